"""`DistributedOptimizer` and `load_model`, with Horovod's arguments for Keras."""

from __future__ import annotations

from typing import Any

import keras

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Average, ReduceOp
from stretto.horovod.tensorflow.compression import Compression
from stretto.horovod.tensorflow.optimizer import distributed


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,  # noqa: FBT001, FBT002
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,  # noqa: FBT001, FBT002
) -> Any:
    """Return an optimizer of Keras 3, which now reduces gradients first.

    The arguments are those of `stretto.horovod.tensorflow.DistributedOptimizer`, in
    another order.

    Raises:
        NotImplementedError: ``op`` is `Adasum`.
        SpecError: it isn't an optimizer of Keras 3, or is distributed already.
        ValueError: an argument breaks its rule.
    """
    del name, device_dense, device_sparse, scale_local_gradients
    return distributed(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Return a model from its file, with its optimizer distributed.

    Args:
        filepath: As in ``keras.models.load_model``.
        custom_optimizers: Classes of optimizers that aren't Keras's.
        custom_objects: As in ``keras.models.load_model``.
        compression: Applied on the wire.
        legacy_opts: Must be False: Keras 3 has no legacy optimizers.

    Raises:
        ValueError: ``legacy_opts`` is true, or the model has no optimizer.
    """
    if legacy_opts:
        raise ValueError("legacy_opts must be False: Keras 3 has no legacy optimizers")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects |= custom_objects or {}
    model = keras.models.load_model(filepath, objects)
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{filepath} has no optimizer: save a model that is compiled, or load it "
            "with keras.models.load_model and compile it with DistributedOptimizer"
        )
    DistributedOptimizer(model.optimizer, compression=compression)
    return model
