"""Snapshots of a training job on disk, from which it resumes at the exact step.

`manifests` names complete snapshots and finds the newest; it imports no torch.
`exact_load` gives optimizers their state without a change of types, called by
`stretto.elastic.training`. `snapshots` copies a job's state, writes it beside
training, and reads it again. What the state consists of is in `stretto.elastic`, which
uses all of them.
"""
