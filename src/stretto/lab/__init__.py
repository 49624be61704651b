"""An emulated cluster on one Linux machine.

- `launch`: runs a command in a lab (for `cli` and `demo`).
- `spec`: what is passed to it (shared, for instance by `launch` and `network`).
- `supervisor`: the process that keeps a lab running (for `launch`).
- `network`: its namespaces and rates (for `faults` and `supervisor`).
- `faults`: break namespaces, and ranks (for `launch` and `supervisor`).
- `syscalls`: system calls that Python lacks (shared, for instance by `network` and
  `supervisor`).
- `pacing`: a folder for the path of ranks in mode ``paced`` (set by `launch`), whose
  `sitecustomize` caps their connections.
- `ports`: ports at which ranks meet (shared, for instance by `members.keeper` and
  `cluster.engine_ray`).
"""

from stretto.lab.launch import run_lab
from stretto.lab.spec import LabSpec, Mode

__all__ = ["LabSpec", "Mode", "run_lab"]
