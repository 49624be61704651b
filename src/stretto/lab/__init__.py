"""An emulated cluster on one Linux machine."""

from stretto.lab.launch import run_lab
from stretto.lab.spec import LabSpec, Mode

__all__ = ["LabSpec", "Mode", "run_lab"]
