"""Batch norms of the user's whose forward repeats torch's and adds to it.

# Note [Copied norms]
Libraries derive from torch's batch norm, repeat its forward, and then call another
module such as an activation, as timm's ``BatchNormAct2d`` does. Such a forward counts
batches by a write into a buffer, and calls ``batch_norm`` with the module's own
tensors. If both are what torch's forward does, torch's forward is recorded in their
place, as an operation of the norm. All else that forward does is recorded as usual.
Layers get a norm with torch's forward that holds the same parameters and buffers. So do
they if a program replaces the forward of torch's class, or of one norm.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.nn import functional

from stretto.burst.tracing.replaced import is_torchs_forward
from stretto.burst.tracing.torch_modules import PLAIN_NORMS, BatchNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KINDS = tuple(PLAIN_NORMS)

_BATCH_NORM = functional.__file__, "batch_norm"
_SIGNATURE = inspect.signature(functional.batch_norm)


def is_copied(module: nn.Module) -> bool:
    """Return whether a module is a batch norm that has a forward of its own."""
    forward: Any = module.__dict__.get("forward", type(module).forward)
    return isinstance(module, _KINDS) and not is_torchs_forward(forward)


def plain_norm(module: nn.Module) -> nn.Module:
    """Return a module as layers run it: a copied norm as one of torch's class."""
    if not is_copied(module):
        return module
    kind = next(kind for kind in _KINDS if isinstance(module, kind))
    found: nn.Module = PLAIN_NORMS[kind].__new__(PLAIN_NORMS[kind])
    # With the same dictionaries of parameters and buffers.
    found.__dict__.update(module.__dict__)
    found.__dict__.pop("forward", None)
    return found


@final
class CopiedNorms:
    """Recognizes the calls of such norms in one forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._norms: list[Any] = [part for part in modules if is_copied(part)]
        self._counted: dict[int, str] = {}
        """Where norms have counted a batch that they have not normalized yet."""

    def counts(
        self, name: str, args: tuple[Any, ...], place: Callable[[], str]
    ) -> bool:
        """Return whether a call counts a batch of a norm in training."""
        if not self._norms or name not in ("add_", "__iadd__") or len(args) != 2:
            return False
        if isinstance(args[1], Tensor) or args[1] != 1:
            return False
        for norm in self._norms:
            if norm.num_batches_tracked is args[0] and norm.training:
                is_first = id(norm) not in self._counted
                self._counted[id(norm)] = place()
                return is_first
        return False

    def normalizing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the norm whose torch forward makes this call of ``batch_norm``.

        If there is no such norm, return None.
        """
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        for norm in self._norms:
            if (
                norm.running_mean is None
                or norm.running_mean is not call["running_mean"]
            ):
                continue
            is_same = (
                call["running_var"] is norm.running_var
                and call["weight"] is norm.weight
                and call["bias"] is norm.bias
                and call["eps"] == norm.eps
                and bool(call["training"]) is norm.training
                and _takes(norm, call["input"])
            )
            is_update = norm.track_running_stats and id(norm) in self._counted
            is_update = is_update and call["momentum"] == norm.momentum
            if not is_same or (norm.training and not is_update):
                return None
            self._counted.pop(id(norm), None)
            return norm
        return None

    def left(self) -> tuple[Any, str] | None:
        """Return a norm that counted a batch without normalizing it, and where."""
        for norm in self._norms:
            if id(norm) in self._counted:
                return norm, self._counted[id(norm)]
        return None


def is_of(call: Any) -> bool:
    """Return whether a function is the one that norms call."""
    code = getattr(call, "__code__", None)
    return code is not None and (code.co_filename, code.co_name) == _BATCH_NORM


def torch_forward(norm: Any, rows: Tensor) -> Tensor:
    """Run torch's forward of a norm."""
    found: Tensor = BatchNorm.forward(norm, rows)
    return found


def _takes(norm: Any, rows: Any) -> bool:
    try:
        norm._check_input_dim(rows)  # noqa: SLF001
    except ValueError:
        return False
    return True
