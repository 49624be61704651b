"""Carries out a plan on torch.distributed."""

from stretto.runtime.ddp import DistributedDataParallel
from stretto.runtime.recorder import AbstractStepObserver, Recorder
from stretto.runtime.routes import TensorRow

__all__ = [
    "AbstractStepObserver",
    "DistributedDataParallel",
    "Recorder",
    "TensorRow",
]
