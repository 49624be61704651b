"""Background jobs: use a device while its foreground job waits.

The two sides:

- `lease`: the background's side, a lease of the device for each task (for
  `script_leases` and `demo.background_job`, and programs).
- `foreground`: the foreground's side, which marks its steps and waits (for
  `named_device` and `demo.background_worker`, and programs).
- `board`: what the two processes share (shared, for instance by `foreground` and
  `lease`).
- `named_device`: open the foreground's side for scripts (shared, for instance by
  `script_leases` and `burst.executor`).
- `script_leases`: open the background's side for scripts, with torch (for `script`).
- `program_change`: leave devices at ``exec`` (for `foreground` and `lease`).

When a task starts:

- `foreground_view`: follow the foreground's marks (for `lease`).
- `windows`: when in a step the device is idle, and for how long (shared, for instance
  by `foreground_view` and `board`).
- `pacing`: when a task may start, and what it costs (for `foreground_view`, `lease` and
  `pair_measurement`).
- `paired_steps`: the foreground's loss, by steps with a background and without (for
  `foreground_view` and `pacing`).

The device:

- `devices`: one module per kind of device; that for CUDA imports torch.
- `priority`: less of the processors for a background than for any foreground (shared,
  for instance by `devices.cuda` and `devices.exclusive`).

Beside a background's tasks:

- `background_statistics`: what a background reports about itself (for `lease`).
- `pair_measurement`: what it costs the foreground, and its own rate (for `lease`).
- `child_processes`: processes that it has started (for `lease` and `script_leases`).
- `interrupts`: end a script's lease at Ctrl-C (for `script_leases`).
- `step_reports`: count the steps of a cluster's job, with torch (for `named_device`
  and `script`).
"""
