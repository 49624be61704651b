"""Execute a plan on torch.distributed."""

# Import first, so that its exit handler runs last.
from stretto.runtime import quiesce as _quiesce  # noqa: F401
from stretto.runtime.ddp import DistributedDataParallel
from stretto.runtime.ranks import TensorRow
from stretto.runtime.recording.step import AbstractStepObserver, Recorder

__all__ = [
    "AbstractStepObserver",
    "DistributedDataParallel",
    "Recorder",
    "TensorRow",
]
