"""Recording of steps, on one rank and across ranks.

- `step`: one rank's record (for `runtime.ddp`, and for programs that observe steps).
- `gathering` collects all ranks' records on rank 0, with `clocks`; `merging` puts them
  on one clock (for `tune.artifacts`).
"""
