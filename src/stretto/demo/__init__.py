"""The main job end to end on one machine: emulated cluster, real training.

- `driver`: starts the lab and shows the results (shared, for instance by `background`
  and `worker`).
- `settings`: the options (shared, for instance by `worker` and `driver`).
- `worker`: one rank (for `background_worker` and `driver`).
- `tasks`: what it trains (for `worker`).
- `background`: the same for background jobs (for `cli.demo` and `background_worker`).
- `background_worker`: one rank of it (for `background`).
- `background_job`: a background's process (for `background_worker`).
"""
