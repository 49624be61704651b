"""Recording of steps, on one rank and across ranks.

- `step`: one rank's record.
- `clocks`, `gathering`, `merging`: all ranks' records on one clock.
"""
