"""Snapshots of a training job on disk, from which it resumes at the exact step.

- `manifests`: name complete snapshots and find the newest (for `snapshots` and
  `elastic.training`). It imports no torch.
- `exact_load`: give optimizers their state without a change of types (for
  `elastic.training`).
- `fitting`: compare a snapshot with the program that reads it (for
  `elastic.training`).
- `snapshots`: copy a job's state, write it beside training, and read it again (for
  `elastic`).

What the state consists of is in `stretto.elastic`.
"""
