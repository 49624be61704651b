"""An emulated cluster on one Linux machine.

- `launch`: runs a command in a lab (for `stretto lab`, the demo and `stretto doctor`);
  `spec`: what is passed to it.
- `supervisor`: the process that keeps a lab running; `network`: its namespaces and
  rates; `faults`: breaks them, and ranks; `syscalls`: what Python lacks for all.
- `pacing`: a folder for the path of ranks in mode ``paced`` (from `launch`), whose
  `sitecustomize` caps their connections.
- `ports`: ports at which ranks meet (also for `stretto.cluster`).
"""

from stretto.lab.launch import run_lab
from stretto.lab.spec import LabSpec, Mode

__all__ = ["LabSpec", "Mode", "run_lab"]
