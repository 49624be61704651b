"""Optimizers that reduce gradients over ranks before they apply them.

# Note [Apply]
Every way to train with Keras 3, on each of its backends, ends in the optimizer's
`apply`: ``fit``, ``train_on_batch`` and custom loops. So one override is enough, in a
class made from the optimizer's own, whose name and configuration it keeps. Files of
models are those of the optimizer itself. Keras's loss scaling is the exception: it
skips steps whose gradients aren't finite, which differs by rank unless gradients are
reduced first. So it may be within, but not outside.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import keras

from stretto.errors import SpecError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

_log = get_logger(__name__)


class ReducingOptimizer:
    """Comes before an optimizer's own class."""

    _stretto_reduce: Any
    """Takes and returns a list of gradients."""

    _reduces = True

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> Any:
        # Keras copies through a file, which names the optimizer's own class.
        by_file: Any = super().__reduce__()
        restore, arguments = by_file
        return reducing(restore(*arguments), self._stretto_reduce)

    def build(self, variables: Any) -> None:
        """Create the optimizer's variables, as Keras.

        Raises:
            SpecError: the optimizer is within a loss scaling, or a distribution of
                Keras is active.
        """
        for owner in _owners(sys._getframe(1)):  # noqa: SLF001
            is_scaling = isinstance(owner, keras.optimizers.LossScaleOptimizer)
            if is_scaling and owner is not self and owner.inner_optimizer is self:
                raise SpecError(_WITHIN_LOSS_SCALE)
        if keras.distribution.distribution() is not None:
            raise SpecError(
                "keras.distribution distributes training itself: leave "
                "set_distribution out, and start one process per device"
            )
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce gradients over ranks, then apply them as Keras."""
        grads = list(grads)
        if self._reduces:
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            grads = self._reduced(grads, trainable_variables)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Reduce gradients over ranks, then apply them as Keras, without state."""
        grads = self._reduced(list(grads), None)
        self._reduces = False  # Keras calls `apply`
        try:
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )
        finally:
            self._reduces = True

    def _reduced(self, grads: list[Any], variables: list[Any] | None) -> list[Any]:
        this: Any = self
        known: Any = variables
        if known is None:
            known = getattr(this, "_trainable_variables", ())
        for variable in known:
            if this._overwrite_variable_with_gradient(variable):  # noqa: SLF001
                raise SpecError(
                    f"the gradient of {variable.name} is a value that replaces it, "
                    "which an average would change: quantized training isn't provided"
                )
        return list(self._stretto_reduce(grads))


_WITHIN_LOSS_SCALE = (
    "a distributed optimizer within LossScaleOptimizer waits for ranks whose gradients "
    "were not finite, which skip the step. Put it outside: DistributedOptimizer("
    "keras.optimizers.LossScaleOptimizer(optimizer)). With the policy mixed_float16 "
    "compile() puts one around any optimizer that isn't one itself."
)


def _owners(frame: FrameType | None) -> Iterator[Any]:
    """Return the objects whose methods are running."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None:
            yield owner
        frame = frame.f_back


def turn_jit_off(model: Any) -> None:
    """Keep XLA from compiling a model's steps where it can't call back."""
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        _log.warning(
            "jit_compile is turned off for model %s: XLA for TensorFlow can't call "
            "back, so it could send no gradients",
            model.name,
        )
        model.jit_compile = False


def reduces(model: Any) -> bool:
    """Return whether a model's optimizer reduces gradients over ranks."""
    return isinstance(getattr(model, "optimizer", None), ReducingOptimizer)


@functools.cache
def _class_for(cls: type, reduce: Any) -> type:
    made = type(
        cls.__name__,
        (ReducingOptimizer, cls),
        {
            "_stretto_reduce": staticmethod(reduce),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        },
    )
    # A file of a model names the optimizer's own class. Without these tables it would
    # do so too, but by a module of Keras that isn't public.
    with contextlib.suppress(ImportError, AttributeError):
        from keras.src import api_export
        from keras.src.saving import object_registration

        for table in (
            api_export.REGISTERED_OBJS_TO_NAMES,
            object_registration.GLOBAL_CUSTOM_NAMES,
        ):
            if cls in table:
                table[made] = table[cls]
    return made


def reducing(optimizer: Any, reduce: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """Return the optimizer, whose class now reduces gradients first.

    Its state, if it has any, stays. ``reduce`` takes and returns a list of gradients.

    Raises:
        SpecError: it isn't an optimizer of Keras 3, or reduces already.
    """
    if isinstance(optimizer, str | dict):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise SpecError(
            "optimizer must be one of Keras 3 (keras.optimizers.Optimizer), got "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, ReducingOptimizer):
        raise SpecError("the optimizer is distributed already: wrap it once")
    if isinstance(inner, ReducingOptimizer):
        raise SpecError(_WITHIN_LOSS_SCALE)
    cls: Any = type(optimizer)
    optimizer.__class__ = _class_for(cls, reduce)
    return optimizer
