"""Carries out a plan on torch.distributed."""

from stretto.runtime.ddp import DistributedDataParallel, TensorRow
from stretto.runtime.recorder import AbstractStepObserver, Recorder

__all__ = [
    "AbstractStepObserver",
    "DistributedDataParallel",
    "Recorder",
    "TensorRow",
]
