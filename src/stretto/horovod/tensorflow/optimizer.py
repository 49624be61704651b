"""`DistributedOptimizer` with Horovod's arguments, for optimizers of Keras 3."""

from __future__ import annotations

from typing import Any

from stretto.horovod.keras3.optimizer_class import reducing
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Average, ReduceOp
from stretto.horovod.tensorflow.compression import Compression
from stretto.horovod.tensorflow.gradients import on_values
from stretto.horovod.tensorflow.tape import reduction, refuse_groups


def distributed(
    optimizer: Any,
    *,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: ReduceOp,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
) -> Any:
    """Return the optimizer, which now reduces gradients first.

    Raises:
        NotImplementedError: ``op`` is `Adasum`.
        SpecError: it isn't an optimizer of Keras 3, or is distributed already.
        ValueError: an argument breaks its rule.
    """
    import keras

    refuse_groups(num_groups, groups)
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be >= 1, got {backward_passes_per_step}"
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Horovod's interface for Keras needs the backend tensorflow, got "
            f"{keras.backend.backend()}: use stretto.keras, which has others too"
        )
    reduce = reduction(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    if backward_passes_per_step > 1:
        if getattr(optimizer, "built", False):
            raise ValueError(
                "backward_passes_per_step needs an optimizer that isn't built: wrap it "
                "before compile() and before its first step"
            )
        # Keras applies the mean of several steps' gradients, Horovod their sum.
        optimizer.gradient_accumulation_steps = backward_passes_per_step
        if not average_aggregated_gradients:
            reduce = _scaled(reduce, backward_passes_per_step)
    return reducing(optimizer, reduce)


def _scaled(reduce: Any, factor: int) -> Any:
    def scaled(gradients: Any) -> list[Any]:
        return [on_values(g, lambda v: v * factor) for g in reduce(gradients)]

    return scaled


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: FBT001, FBT002
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,  # noqa: FBT001, FBT002
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,  # noqa: FBT001, FBT002
) -> Any:
    """Return an optimizer of Keras 3, which now reduces gradients first.

    It is the same object, of a subclass of its own class.

    Args:
        optimizer: An optimizer of Keras 3. Optimizers of TensorFlow 1 are refused.
        name: Has no effect.
        use_locking: Has no effect.
        device_dense: Has no effect.
        device_sparse: Has no effect.
        compression: Applied on the wire.
        sparse_as_dense: Whether to reduce ``tf.IndexedSlices`` as dense tensors; if
            not, all ranks' rows are gathered.
        backward_passes_per_step: Number of steps whose gradients are applied at once;
            each step's are reduced.
        op: The reduction.
        gradient_predivide_factor: Splits an average's division: by this factor before
            the sum, and by the rest after it.
        average_aggregated_gradients: Whether gradients of several steps are averaged;
            if not, they are added up.
        num_groups: Has no effect: small gradients are sent together anyway.
        groups: Has no effect.
        process_set: The participating ranks.
        scale_local_gradients: Has no effect: an optimizer has no local variables.

    Raises:
        NotImplementedError: ``op`` is `Adasum`.
        SpecError: it isn't an optimizer of Keras 3, or is distributed already.
        ValueError: an argument breaks its rule.
    """
    del name, use_locking, device_dense, device_sparse, scale_local_gradients
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
