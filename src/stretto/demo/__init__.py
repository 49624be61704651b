"""The main job end to end on one machine: emulated cluster, real training.

- `driver`: starts the lab and shows the results (shared); `settings`: the
  options; `worker`: one rank; `tasks`: what it trains.
- `background`: the same for background jobs; `background_worker`: one rank of it;
  `background_job`: a background's process.
"""
