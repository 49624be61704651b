"""Call Python functions of this process from a TensorFlow graph.

In a `tf.function` a call is a stateful operation. TensorFlow runs these in program
order, which is the same on all ranks, where gradients become ready in an order that
varies. Eagerly it is a plain call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch

from stretto.errors import SpecError
from stretto.horovod import world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKEN = tf.TensorSpec((), tf.float32)
"""The result of a call that is made for its effect."""

not_converted: Any = tf.autograph.experimental.do_not_convert
"""Keeps AutoGraph from rewriting a function that it meets while it traces."""

_traced_alone = False


def host_call(
    function: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[Any],
) -> list[Any]:
    """Have ``function(*arrays)`` called with NumPy arrays; return tensors.

    The function keeps nothing of its arrays, and returns memory that is not written
    later. It is called once per execution even if its results are unused.

    Args:
        function: Returns one array for each of ``results``.
        arguments: Tensors.
        results: What it returns, as ``tf.TensorSpec``; dimensions may be None.

    Raises:
        SpecError: XLA compiles the function that is being traced.
    """
    require_no_xla()
    tensors = [tf.convert_to_tensor(argument) for argument in arguments]
    if tf.executing_eagerly():
        found = function(*(np.asarray(tensor.numpy()) for tensor in tensors))
        return [
            tf.convert_to_tensor(value, spec.dtype)
            for value, spec in zip(found, results, strict=True)
        ]

    @not_converted
    def run(*arrays: Any) -> list[Any]:
        found = function(*(np.asarray(array) for array in arrays))
        return [
            np.asarray(value, spec.dtype.as_numpy_dtype)
            for value, spec in zip(found, results, strict=True)
        ]

    outputs = tf.numpy_function(run, tensors, [spec.dtype for spec in results])
    for output, spec in zip(outputs, results, strict=True):
        output.set_shape(spec.shape)
    return list(outputs)


def require_one_device() -> None:
    """Require that one device of this process computes, and note when it is alone.

    Raises:
        SpecError: a strategy of `tf.distribute` is active, there are several devices,
            or the function is compiled by XLA.
    """
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise SpecError(
            f"reducing gradients within {name} isn't provided: it distributes training "
            "itself. Leave the strategy out, and start one process per device."
        )
    for kind in ("GPU", "CPU"):
        count = len(tf.config.list_logical_devices(kind))
        if count > 1:
            raise SpecError(
                f"TensorFlow has {count} {kind} devices in this process, and one is "
                "needed: start one process per device. Before anything else uses "
                "them, call tf.config.set_visible_devices(devices[hvd.local_rank()], "
                f"{kind!r})."
            )


def require_no_xla() -> None:
    """Require that XLA doesn't compile the `tf.function` that is being traced.

    Raises:
        SpecError: it does.
    """
    frame = None if tf.executing_eagerly() else sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        # The function that TensorFlow traces is known to its own frames only.
        if getattr(frame.f_locals.get("self"), "_jit_compile", None) is True:
            raise SpecError(
                "nothing can be sent, and no gradients reduced, in a function that XLA "
                "compiles: XLA for TensorFlow can't call back. Pass jit_compile=False "
                "to tf.function or to model.compile(), or the callback "
                "BroadcastInitialState to fit()."
            )
        frame = frame.f_back


def is_alone(size: int) -> bool:
    """Return whether ``size`` is 1; remember graphs of jobs of one rank."""
    global _traced_alone
    if world.size() == 1 and not tf.executing_eagerly():
        _traced_alone = True
    return size == 1


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job, as `stretto.horovod.world.init`.

    Raises:
        SpecError: functions were traced for one rank, and now there are several.
        ValueError: as in `stretto.horovod.world.init`.
        HorovodInternalError: as in `stretto.horovod.world.init`.
    """
    is_first = not world.is_initialized()
    world.init(*args, **kwargs)
    if is_first:
        torch.set_num_threads(1)  # torch only copies here, beside TensorFlow's threads
    if _traced_alone and world.size() > 1:
        world.shutdown()
        raise SpecError(
            "this process has traced functions as a job of one rank: they send "
            "nothing. Call init() with several ranks in a new process."
        )
