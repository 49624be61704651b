"""Models from files, and models equal on all ranks."""

from __future__ import annotations

from typing import Any

import keras

from stretto.horovod.keras3.model_state import broadcast_state
from stretto.horovod.reduce_ops import Average, ReduceOp
from stretto.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_objects: Any = None,
    *,
    op: ReduceOp = Average,
    sparse_as_dense: bool = False,
    safe_mode: bool = True,
) -> Any:
    """Return a model from its file, with its optimizer distributed.

    Args:
        filepath: A file that ``model.save`` wrote, on one rank or any.
        custom_objects: As in ``keras.models.load_model``.
        op: The reduction of gradients.
        sparse_as_dense: As in `DistributedOptimizer`.
        safe_mode: As in ``keras.models.load_model``.

    Raises:
        SpecError: ``op`` is not a reduction.
    """
    model = keras.models.load_model(filepath, custom_objects, safe_mode=safe_mode)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, op=op, sparse_as_dense=sparse_as_dense)
    return model


def broadcast_model(model: Any, root: int = 0) -> None:
    """Assign rank ``root``'s weights and optimizer state on all ranks.

    For custom loops; in ``fit`` use `BroadcastInitialState`. Seeds of random layers and
    states of metrics stay each rank's own.

    Raises:
        SpecError: the model isn't built, or ranks have different variables.
        HorovodInternalError: a rank is lost.
    """
    broadcast_state(model, root)
