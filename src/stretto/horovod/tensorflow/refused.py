"""Names of Horovod that are not provided: calling one says what to use."""

from __future__ import annotations

from typing import Any, NoReturn


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise: TensorFlow 2 has no global variables.

    Raises:
        NotImplementedError: always.
    """
    del root_rank
    raise NotImplementedError(
        "TensorFlow 2 has no global variables: use broadcast_variables("
        "model.variables, root_rank), or BroadcastGlobalVariablesCallback in fit"
    )


class BroadcastGlobalVariablesHook:
    """Raises: TensorFlow 2 has no sessions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise NotImplementedError(
            "BroadcastGlobalVariablesHook needs sessions of TensorFlow 1: use "
            "broadcast_variables(model.variables, root_rank=0) after the first step"
        )


def PartialDistributedGradientTape(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802
    """Raise: local layers are registered with the tape.

    Raises:
        NotImplementedError: always.
    """
    del args, kwargs
    raise NotImplementedError(
        "PartialDistributedGradientTape is not provided: use DistributedGradientTape, "
        "and tape.register_local_source(variable) for the variables of local layers"
    )


def PartialDistributedOptimizer(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802
    """Raise: an optimizer has no local variables.

    Raises:
        NotImplementedError: always.
    """
    del args, kwargs
    raise NotImplementedError(
        "PartialDistributedOptimizer is not provided: train with "
        "DistributedGradientTape, and tape.register_local_source(variable) for the "
        "variables of local layers"
    )
