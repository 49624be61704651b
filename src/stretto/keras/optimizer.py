"""`DistributedOptimizer`: any optimizer of Keras 3, with gradients of all ranks."""

from __future__ import annotations

from typing import Any

from stretto.errors import SpecError
from stretto.horovod.keras3.optimizer_class import reducing
from stretto.horovod.reduce_ops import ENGINE_OPS, Average, ReduceOp
from stretto.keras.backends import reducer


def DistributedOptimizer(  # noqa: N802
    optimizer: Any, *, op: ReduceOp = Average, sparse_as_dense: bool = False
) -> Any:
    """Return the optimizer, which now reduces gradients over ranks first.

    It is the same object, with its state, and of a subclass of its own class. All ranks
    must apply gradients equally often, with equal shapes. On TensorFlow and JAX each
    gradient is sent while backward computes the next ones; on PyTorch all leave
    together after it. Files of models name the original class: load them with
    `load_model` of this package to continue training on all ranks.

    With ``gradient_accumulation_steps`` every step's gradients are reduced.

    Args:
        optimizer: An optimizer of Keras 3, or its name. A
            ``keras.optimizers.LossScaleOptimizer`` goes inside: pass it here.
        op: The reduction.
        sparse_as_dense: Whether to reduce TensorFlow's gradients of embeddings
            (``tf.IndexedSlices``) as dense tensors, during backward. If not, all ranks'
            rows are gathered after it. Only this gives Adam what one process gives it:
            Keras squares each row of a batch by itself, also rows of one index.

    Raises:
        SpecError: it isn't an optimizer of Keras 3, it is distributed already, or
            ``op`` is not a reduction.
    """
    if op not in ENGINE_OPS:
        raise SpecError(
            f"op must be one of {', '.join(o.name for o in ENGINE_OPS)}, got {op!r}"
        )
    return reducing(optimizer, reducer(op, sparse_as_dense))
