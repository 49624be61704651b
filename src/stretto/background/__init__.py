"""Background jobs: use a device while its foreground job waits.

`board` is what the two processes share, `foreground_view` follows its marks, `windows`
and `pacing` decide when a task starts, by the loss that `paired_steps` finds;
`priority` and `devices` keep it out of the foreground's way. `lease` is the
background's side and `foreground` the foreground's; `named_device` and `script_leases`
open them for scripts, and `interrupts` ends a script's lease at Ctrl-C.
`background_statistics` and `pair_measurement` are what a background reports, and
`child_processes` what it has started. `program_change` leaves devices at
``exec``. `step_reports` counts the steps of a cluster's job. Only a device,
`script_leases` and `step_reports` import torch.
"""
