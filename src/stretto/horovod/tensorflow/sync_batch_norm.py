"""`SyncBatchNormalization`: batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from stretto.horovod import world
from stretto.horovod.reduce_ops import Sum
from stretto.horovod.tensorflow.host_calls import not_converted
from stretto.horovod.tensorflow.operations import allreduce

_BatchNormalization: Any = keras.layers.BatchNormalization


class SyncBatchNormalization(_BatchNormalization):  # type: ignore[misc]
    """A layer as ``keras.layers.BatchNormalization``, with moments of all ranks.

    All ranks must call it in training equally often; numbers of samples may differ.

    Args:
        fused: Must be False.
        **kwargs: As in ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused`` is true.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(**kwargs)

    @not_converted
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance, by Keras's own seam."""
        if not world.is_initialized() or world.size() == 1:
            mean, variance = super()._moments(inputs, mask)
            return mean, variance
        rank = inputs.shape.rank
        axes = [i for i in range(rank) if i != self.axis % rank]
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)

        def total(values: Any) -> Any:
            return tf.reduce_sum(values * weights, axes)

        # Not the mean of squares minus the mean's square, which cancels digits.
        count, sums = tf.unstack(
            allreduce(tf.stack([total(tf.ones_like(inputs)), total(inputs)]), op=Sum)
        )
        shape = [1] * rank
        shape[self.axis % rank] = -1
        mean = sums / count
        squares = (inputs - tf.reshape(mean, shape)) ** 2
        return mean, allreduce(total(squares), op=Sum) / count
