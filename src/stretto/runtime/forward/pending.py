"""Parameters and optimizer states whose update has not been executed yet.

# Note [A class for the time between]
From ``optimizer.step()`` until its update, a parameter has the class
`PendingParameter`, and tensors of its optimizer state have `PendingState`. The argument
parser of every operation in C++ asks a class's ``__torch_function__``, as Python's own
functions do, so whatever reads or writes such a tensor settles its bucket first and
then runs on the plain tensor. Metadata and ``grad`` settle nothing. PyTorch itself
changes the class of an `UninitializedParameter` in this way.

What is called with such a tensor through pybind does not ask. Therefore a module's
parameters are settled when the module is called (`readers.py`), and a parameter that
was never seen to be read is settled as forward begins (`overlap.py`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stretto.runtime.forward.lazy import METADATA

if TYPE_CHECKING:
    from stretto.runtime.forward.member import Member

_guarded: dict[int, Member] = {}
"""Members by the id of each of their tensors that has one of the classes here."""

_slot: Any = torch._C.TensorBase.grad  # noqa: SLF001
_get_grad: Any = _slot.__get__
_set_grad: Any = _slot.__set__
_del_grad: Any = _slot.__delete__

plainly: Any = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
"""Context in which this thread's operations ask no tensor's class."""


class _Guard:
    """What both classes do."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Settle the tensors that an operation reads, then call it."""
        if func in METADATA:
            with plainly():
                return func(*args, **(kwargs or {}))
        found = settle_all_in(args)
        if kwargs:
            found = settle_all_in(kwargs.values()) or found
        if not found:  # in a container that the search does not know
            for member in list(_guarded.values()):
                member.owner.touch(member)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle(self)
        return self.__reduce_ex__(protocol)


def _grad(self: Any) -> torch.Tensor | None:
    with plainly():
        found: torch.Tensor | None = _get_grad(self)
    return found


def _assign_grad(self: Any, value: torch.Tensor | None) -> None:
    with plainly():
        _set_grad(self, value)


def _delete_grad(self: Any) -> None:
    with plainly():
        _del_grad(self)


class PendingParameter(_Guard, nn.Parameter):
    """A parameter before its update. See Note [A class for the time between]."""

    # A tenth of the time of a call of ``__torch_function__``.
    grad = property(_grad, _assign_grad, _delete_grad)


class PendingState(_Guard, torch.Tensor):
    """A tensor of an optimizer's state before its update."""


def settle(tensor: Any) -> None:
    """Settle the bucket of one guarded tensor."""
    member = _guarded.get(id(tensor))
    if member is None:  # its guard has ended in another thread
        return
    member.owner.touch(member)


def settle_all_in(values: Any) -> bool:
    """Settle the guarded tensors among values and their containers.

    Returns:
        Whether there was one.
    """
    found = False
    for value in values:
        if isinstance(value, _Guard):
            settle(value)
            found = True
        elif isinstance(value, list | tuple | set | frozenset):
            found = settle_all_in(value) or found
        elif isinstance(value, dict):
            found = settle_all_in(value.values()) or found
    return found


def member_of(parameter: torch.Tensor) -> Member | None:
    """Return the member of a guarded parameter."""
    return _guarded.get(id(parameter))


def guard(member: Member, states: list[torch.Tensor]) -> None:
    """Give a parameter, and tensors of its optimizer state, the classes above."""
    before = _guarded.get(id(member.parameter))
    if before is not None and before is not member:
        before.owner.touch(before)  # another model's
    tensors: list[torch.Tensor] = [member.parameter]
    member.parameter.__class__ = PendingParameter
    for state in states:
        if type(state) is torch.Tensor:
            state.__class__ = PendingState
            tensors.append(state)
    member.guarded = tensors
    for tensor in tensors:
        _guarded[id(tensor)] = member


def unguard(member: Member) -> None:
    """Give them their own classes back."""
    for tensor in member.guarded:
        _guarded.pop(id(tensor), None)
        if type(tensor) is PendingParameter:
            tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        elif type(tensor) is PendingState:
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]
    member.guarded = []
