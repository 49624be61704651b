"""Choose how many GPUs each layer gets (burst parallelism, DeepPool section 4).

- `plan`: the fastest plan within a limit, or the nearest feasible limit (shared, for
  instance by `simulated` and `_api.burst`).
- `simulated`: the fastest by simulated steps on a measured cluster (shared, for
  instance by `collocated` and `cluster.job_plans`).
- `scaling`: four methods of scaling, compared (for `_api.burst`).
- `collocated`: plans over amplification limits with a background job beside them (for
  `_api.burst`).
- `problem`: one problem with its costs as arrays, and a decision (shared, for instance
  by `front` and `cuts`).
- `evaluate`: a decision's cost from the definitions, as the reference (shared, for
  instance by `front` and `papers.deeppool`).
- `tree`: the parse of a series-parallel graph (shared, for instance by `search` and
  `front`).
- `search`: its shortest step (shared, for instance by `plan` and `crossing`).
- `edges`: relaxation over one edge (for `front`, `plan` and `search`).
- `sharing`: GPUs among branches (for `search`).
- `front`: the Pareto front of time against GPU time (for `plan`).
- `crossing`: plans for graphs whose branches cross (for `plan`).
- `cuts`: join layers between two cuts of such a graph (for `crossing`, `evaluate` and
  `plan`).
"""
