"""Background jobs of several devices: micro-batches go to whichever rank has time.

- `gang`: train with the micro-batches of one step (for programs).
- `claims`: share these among the ranks (for `gang`).
- `sums`: add gradients over the members (for `gang`).
- `membership`: decide who is in the gang and when a step ends (for `gang`).
"""
