"""Recording of steps, on one rank and across ranks.

- `step`: one rank's record (shared, for instance by `merging` and `_api.replaying`).
- `gathering`: collect all ranks' records on rank 0 (for `tune.artifacts`).
- `clocks`: how far the ranks' clocks differ (for `gathering`).
- `merging`: put the records on one clock (for `tune.artifacts`).
"""
