"""An emulated cluster on one Linux machine.

- `launch`: runs a command in a lab (for `cli` and `demo`);
  `spec`: what is passed to it.
- `supervisor`: the process that keeps a lab running; `network`: its namespaces and
  rates; `faults`: breaks them, and ranks; `syscalls`: what Python lacks for all.
- `pacing`: a folder for the path of ranks in mode ``paced`` (set by `launch`), whose
  `sitecustomize` caps their connections.
- `ports`: ports at which ranks meet (shared).
"""

from stretto.lab.launch import run_lab
from stretto.lab.spec import LabSpec, Mode

__all__ = ["LabSpec", "Mode", "run_lab"]
