"""Call hooks of modules, and find those that change something without being checked.

# Note [Later hooks]
A hook on gradients that changed none when layers were checked is treated like a later
one: it may decide by something that is not watched. What a later hook of all modules
does to modules that are no layers is not visible in a step: see `later_of_all`.

A capture runs a module with its hooks, so it finds those that mix samples. A hook that
is registered later on a layer of PyTorch's own belongs to no capture. It is called,
because most hooks only look. One that changes something might depend on samples of
other ranks, so its first change is an error. Changes are: another value than the one it
got, writes into a tensor that it got, and gradients that its own hooks on tensors
change. A write through ``.data`` is invisible to PyTorch's counters, so values are
compared in a hook's first calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from stretto.burst.hooks import place_of, times_registered
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_COMPARED = 2
"""Calls of a later hook in which the values that it got are compared."""


@final
class ObservedHook:
    """Calls a module's hook, and reports if it changes something.

    Args:
        hook: the program's.
        kind: of hooks, such as ``_forward_hooks``.
        note: is called with the type of the module, and whether something changed.
        later: whose changes are an error; None if a capture has checked the hook.
    """

    def __init__(
        self,
        hook: Any,
        kind: str,
        note: Callable[[type, bool], None],
        later: LaterHook | None,
    ) -> None:
        self._hook = hook
        self._kind = kind
        self._note = note
        self._later = later

    def __call__(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the hook returns.

        Raises:
            StrettoError: a later hook has changed something.
        """
        given = _tensors_in((args, kwargs))
        before = _versions_of(given)
        look = None if self._later is None else self._later.look(given)
        found = self._hook(part, *args, **kwargs)
        is_other = not (
            found is None or _is_given(found, _changeable(self._kind, args))
        )
        is_written = _versions_of(given) != before
        self._note(type(part), is_other or is_written)
        if self._later is not None and look is not None:
            self._later.require_unchanged(
                look, is_other=is_other, is_written=is_written
            )
        return found


@final
class LaterHook:
    """A hook that no capture has checked, or found to change nothing.

    See Note [Later hooks].
    """

    def __init__(self, hook: Any, key: str, *, is_quiet: bool = False) -> None:
        self._hook = hook
        self._key = key
        self._is_quiet = is_quiet
        self._calls = 0

    def look(self, given: Sequence[Tensor]) -> _Look:
        """Return what the hook gets, before its call."""
        self._calls += 1
        copies: list[Tensor] = []
        if self._calls <= _COMPARED:
            copies = [tensor.detach().clone() for tensor in given]
        hooked = [set(tensor._backward_hooks or ()) for tensor in given]  # noqa: SLF001
        return _Look(given, copies, hooked, times_registered())

    def require_unchanged(
        self, look: _Look, *, is_other: bool, is_written: bool
    ) -> None:
        """Require that a call changed nothing, and that its hooks on tensors won't.

        Raises:
            StrettoError: it changed something.
        """
        if is_other:
            raise self._refusal("returned another value than it got")
        if is_written or look.is_written():
            raise self._refusal("wrote into a tensor that it got")
        if times_registered() != look.registered:
            raise self._refusal("registered a hook of an autograd node")
        for tensor, known in zip(look.given, look.hooked, strict=True):
            held: Any = tensor._backward_hooks or {}  # noqa: SLF001
            for number, hook in list(held.items()):
                if number not in known:
                    held[number] = _TensorHook(hook, self)

    def changed_gradient(self) -> StrettoError:
        """Return the error of a hook on a tensor that changed a gradient."""
        return self._refusal("changed the gradient of a tensor that it got")

    def _refusal(self, what: str) -> StrettoError:
        if self._is_quiet:
            return StrettoError(
                f"{place_of(self._hook)}{self._key} changed no gradient when the "
                f"model's layers were checked, and now it {what}. Whether it keeps "
                "samples apart is unknown, as other samples may be on other ranks: let "
                "it decide by attributes of modules or by globals, which are watched"
            )
        return StrettoError(
            f"{place_of(self._hook)}{self._key} was registered after the burst model "
            f"was built, and {what}. Only the hooks that a model has when it is built "
            "are checked to keep samples apart, as other samples may be on other "
            "ranks: register this one before building BurstParallel, or let it only "
            "read"
        )


@final
class _Look:
    """The arguments of a later hook, before its call."""

    def __init__(
        self,
        given: Sequence[Tensor],
        copies: Sequence[Tensor],
        hooked: Sequence[set[int]],
        registered: int,
    ) -> None:
        self.given = given
        self.hooked = hooked
        self.registered = registered
        self._copies = copies

    def is_written(self) -> bool:
        """Return whether copied values have changed."""
        pairs = zip(self._copies, self.given, strict=False)
        return not all(_is_equal(copy, tensor.detach()) for copy, tensor in pairs)


@final
class _TensorHook:
    """Calls a hook on a tensor, which a later hook of a module has registered."""

    def __init__(self, hook: Any, later: LaterHook) -> None:
        self._hook = hook
        self._later = later

    def __call__(self, grad: Tensor) -> None:
        before = grad._version  # noqa: SLF001
        found = self._hook(grad)
        if not (found is None or found is grad) or grad._version != before:  # noqa: SLF001
            raise self._later.changed_gradient()


def _changeable(kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a hook may return unchanged, of what it gets."""
    if kind.endswith("_forward_hooks"):
        return args[-1:]  # the output
    return args[0], args[:2]  # a pre-hook gets keywords too


def _is_given(found: Any, given: Sequence[Any]) -> bool:
    leaves = [id(leaf) for leaf in pytree.tree_leaves(found)]
    return any(leaves == [id(x) for x in pytree.tree_leaves(one)] for one in given)


def _tensors_in(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]  # noqa: SLF001


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors have equal values, with NaN equal to itself."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
