"""Callbacks that do not keep their object alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a call of a bound method that does nothing once its object is freed.

    A part, or a parameter's hook, that held its owner would keep a model alive until
    garbage collection, or for as long as the parameter lives.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        found = weak()
        if found is not None:
            found(*args, **kwargs)

    return call
