"""Background jobs of several devices: micro-batches go to whichever rank has time.

`claims` shares the micro-batches of one step among ranks, and `gang` trains with them.
"""
