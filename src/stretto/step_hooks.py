"""Which hooks of optimizers leave parameters and gradients alone.

A step can be deferred into the next forward only if nothing reads the parameters right
after it (`stretto.runtime.forward`). Hooks of other packages may; these of ours do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

_F = TypeVar("_F", bound="Callable[..., Any]")

_MARK = "_stretto_reads"


def reads_nothing(hook: _F) -> _F:
    """Mark a hook that reads no parameter and no gradient, and return it."""
    setattr(hook, _MARK, _never)
    return hook


def reads_only(of: Callable[[Optimizer], bool]) -> Callable[[_F], _F]:
    """Mark a hook that reads only what optimizers with ``of(optimizer)`` step."""

    def mark(hook: _F) -> _F:
        setattr(hook, _MARK, of)
        return hook

    return mark


def may_read(hooks: Iterable[Callable[..., Any]], optimizer: Optimizer) -> bool:
    """Return whether any of the hooks may read the optimizer's parameters."""
    return any(getattr(hook, _MARK, _always)(optimizer) for hook in hooks)


def _never(_optimizer: Optimizer) -> bool:
    return False


def _always(_optimizer: Optimizer) -> bool:
    return True
