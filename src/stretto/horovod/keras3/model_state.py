"""A model's weights and its optimizer's state, sent to all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stretto.errors import SpecError
from stretto.horovod.numpy_arrays import broadcast_arrays
from stretto.horovod.torch.functions import allgather_object

if TYPE_CHECKING:
    from collections.abc import Collection


def synchronize_variables(model: Any) -> None:
    """Write the state that a trainer keeps during ``fit`` to the model's variables.

    Only the JAX backend keeps one; its next step reads the variables again.
    """
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def broadcast_state(model: Any, root: int, local: Collection[int] = ()) -> None:
    """Assign rank ``root``'s weights and optimizer state on all ranks.

    Seeds of random layers and states of metrics stay each rank's own.

    Args:
        model: A model that is built, on all ranks.
        root: The rank whose values are sent.
        local: Ids of variables that stay each rank's own.

    Raises:
        SpecError: the model isn't built, or ranks have different variables.
        HorovodInternalError: a rank is lost.
    """
    synchronize_variables(model)
    if not model.built:
        raise SpecError(
            f"model {model.name} has no weights yet: call model.build(input_shape) or "
            "the model itself before its state is broadcast"
        )
    optimizer = getattr(model, "optimizer", None)
    variables = list(model.weights)
    if optimizer is not None:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables += optimizer.variables
    variables = [v for v in variables if id(v) not in local]
    broadcast_values(variables, root)


def broadcast_values(variables: list[Any], root: int) -> None:
    """Assign rank ``root``'s values to variables of Keras on all ranks.

    Raises:
        SpecError: ranks have different variables.
        HorovodInternalError: a rank is lost.
    """
    rows = [(tuple(v.shape), str(v.dtype)) for v in variables]
    by_rank = allgather_object(rows, name="variables")
    for rank, theirs in enumerate(by_rank):
        if theirs != by_rank[root]:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(theirs, by_rank[root], strict=False))
                    if a != b
                ),
                min(len(theirs), len(by_rank[root])),
            )
            raise SpecError(
                f"ranks {rank} and {root} have different variables, from number {at} "
                f"on: {_shown(theirs, at)} and {_shown(by_rank[root], at)}. Build and "
                "compile the same model on all ranks."
            )
    arrays = [np.asarray(keras.ops.convert_to_numpy(v)) for v in variables]
    found = broadcast_arrays(arrays, root, "variable")
    for variable, array in zip(variables, found, strict=True):
        variable.assign(array)


def _shown(rows: list[Any], at: int) -> str:
    return f"{rows[at][1]} of shape {list(rows[at][0])}" if at < len(rows) else "none"
