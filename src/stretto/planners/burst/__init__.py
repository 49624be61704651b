"""Choose how many GPUs each layer gets (burst parallelism, DeepPool section 4).

- `plan` plans: the fastest plan within a limit, or the nearest feasible limit, and
  `simulated` the fastest by simulated steps on a measured cluster. `scaling` compares
  four methods of scaling.
- `problem` holds one problem with its costs as arrays, and a decision. `evaluate`
  computes a decision's cost directly from the definitions, as the reference.
- `tree` parses a series-parallel graph, and `search` finds its shortest step, with
  `edges` (relaxation over one edge), `sharing` (GPUs among branches) and `front` (the
  Pareto front of time against GPU time). `crossing` plans graphs whose branches cross,
  with layers joined by `cuts`.
- `collocated` gives plans over amplification limits with a background job beside them.
"""
