"""Background jobs: use a device while its foreground job waits.

`board` is what the two processes share, `windows` and `pacing` decide when a task
starts, `priority` and `devices` keep it out of the foreground's way. `lease` is the
background's side and `foreground` the foreground's; `named_device` and `script_leases`
open them for scripts. Only a device and `script_leases` import torch.
"""
