"""Background jobs of several devices: micro-batches go to whichever rank has time.

`gang` trains with the micro-batches of one step that `claims` shares among ranks.
`sums` adds gradients over the members, and `membership` decides who is in the gang and
when a step ends (both for `gang`).
"""
