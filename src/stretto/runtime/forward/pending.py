"""Parameters and optimizer states whose update has not been executed yet.

# Note [A class for the time between]
From ``optimizer.step()`` until its update, a parameter has the class
`PendingParameter`, and tensors of its optimizer state have `PendingState`. The argument
parser of most operations asks a class's ``__torch_function__``, as Python's own
functions do, so whatever reads or writes such a tensor finishes its bucket first and
then runs on the plain tensor. Metadata and ``grad`` finish nothing. PyTorch itself
changes the class of an `UninitializedParameter` in this way.

# Note [A twin for what does not ask]
Scripted functions, transforms of ``torch.func``, ``torch.tensor``, process groups,
tensor classes that switch ``__torch_function__`` off, and others take a tensor without
asking its class. Therefore a pending parameter also exchanges its implementation in C++
with a `Twin`: a tensor without memory, whose operators arrive in
``__torch_dispatch__``. They finish the bucket, which exchanges the implementations
again, and then run on the parameter. In autograd a twin is an operation's result on its
parameter, so gradients of what was computed with it go where they belong. What remains
is code that reads an address; it finds none. `fallback.py` says what may hold a
parameter's own implementation or memory; such parameters are never pending.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stretto.runtime.forward.lazy import METADATA, references_to

if TYPE_CHECKING:
    from stretto.runtime.forward.member import BucketMember

_guarded: dict[int, BucketMember] = {}
"""Members by the id of each of their tensors that has one of the classes here."""

_held: set[int] = set()
"""Ids of parameters whose twin's implementation something in C++ refers to weakly.

They keep it, finished or not, until that ends; operators run on their own all the same.
"""

_slot: Any = torch._C.TensorBase.grad  # noqa: SLF001
_get_grad: Any = _slot.__get__
_set_grad: Any = _slot.__set__
_del_grad: Any = _slot.__delete__

_swap: Any = torch._C._swap_tensor_impl  # noqa: SLF001

plainly: Any = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
"""Context in which this thread's operations ask no tensor's class."""


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run an operator on parameters in place of pending ones and of twins."""
    named = {k: _real(v) for k, v in (kwargs or {}).items()}
    given = [_real(value) for value in args]
    if func._schema.is_mutable:  # noqa: SLF001 - as autograd does for plain tensors
        found = [v for v in (*given, *named.values()) if type(v) is nn.Parameter]
        torch.autograd.graph.increment_version(found)
    return func(*given, **named)


def _real(value: Any) -> Any:
    """Return a value with finished parameters in place of pending ones and twins."""
    if isinstance(value, Twin):
        return _real(value.parameter)
    if isinstance(value, _Guard):
        finish(value)
        return plain(value)
    if type(value) in (list, tuple):
        return type(value)(map(_real, value))
    return value


class _Guard:
    """The behavior that both classes share."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Finish the tensors that an operation reads, then call it."""
        if func in METADATA:
            with plainly():
                return func(plain(args[0]), *args[1:], **(kwargs or {}))
        found = finish_all_in(args)
        if kwargs:
            found = finish_all_in(kwargs.values()) or found
        if not found:  # in a container that the search does not know
            for member in list(_guarded.values()):
                member.owner.touch(member)
        if _held:
            with plainly():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)
        return copy.deepcopy(plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish(self)
        return plain(self).__reduce_ex__(protocol)


def plain(tensor: Any) -> Any:
    """Return the tensor that has a guarded one's own implementation."""
    member = _guarded.get(id(tensor))
    if member is None or member.swapped is None or tensor is not member.parameter:
        return tensor
    return member.swapped


def _grad(self: Any) -> torch.Tensor | None:
    member = _guarded.get(id(self))
    own = self if member is None or member.swapped is None else member.swapped
    with plainly():
        found: torch.Tensor | None = _get_grad(own)
    return found


def _assign_grad(self: Any, value: torch.Tensor | None) -> None:
    member = _guarded.get(id(self))
    own = self if member is None or member.swapped is None else member.swapped
    with plainly():
        _set_grad(own, value)


def _delete_grad(self: Any) -> None:
    with plainly():
        _del_grad(plain(self))


def gradient_of(member: BucketMember) -> torch.Tensor | None:
    """Return a member's gradient, where no classes of tensors are asked."""
    twin = member.swapped
    found: torch.Tensor | None = _get_grad(member.parameter if twin is None else twin)
    return found


def assign_gradient(member: BucketMember, value: torch.Tensor | None) -> None:
    """Set a member's gradient, where no classes of tensors are asked."""
    twin = member.swapped
    _set_grad(member.parameter if twin is None else twin, value)


class PendingParameter(_Guard, nn.Parameter):
    """A parameter before its update. See Note [A class for the time between]."""

    # A tenth of the time of a call of ``__torch_function__``.
    grad = property(_grad, _assign_grad, _delete_grad)

    def _use_count(self) -> int:
        finish(self)
        return references_to(plain(self))

    def detach(self) -> torch.Tensor:
        """Finish, then return the parameter's detached tensor."""
        finish(self)
        with plainly():
            found = torch.Tensor.detach(plain(self))
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:  # noqa: SLF001
            # It has looked at this tensor's class and expects the same one.
            return nn.Parameter(found, requires_grad=False)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Finish, then run an operator on the parameter."""
        return _dispatch(func, args, kwargs)


class Twin(torch.Tensor):
    """A tensor without memory. See Note [A twin for what does not ask]."""

    parameter: nn.Parameter

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the parameter, for what was computed while pending."""
        return _dispatch(func, args, kwargs)


class _MakeTwin(torch.autograd.Function):
    """Ties a twin's gradient to its parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        twin: torch.Tensor = make(
            Twin,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return twin

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class PendingState(_Guard, torch.Tensor):
    """A tensor of an optimizer's state before its update."""


def finish(tensor: Any) -> None:
    """Finish the bucket of one guarded tensor."""
    member = _guarded.get(id(tensor))
    if member is None:  # its guard has ended in another thread
        return
    member.owner.touch(member)


def finish_all_in(values: Any) -> bool:
    """Finish the guarded tensors among values and their containers.

    Returns:
        Whether there was one.
    """
    found = False
    for value in values:
        if isinstance(value, _Guard):
            finish(value)
            found = True
        elif isinstance(value, list | tuple | set | frozenset):
            found = finish_all_in(value) or found
        elif isinstance(value, dict):
            found = finish_all_in(value.values()) or found
    return found


def member_of(parameter: torch.Tensor) -> BucketMember | None:
    """Return the member of a guarded parameter."""
    return _guarded.get(id(parameter))


def guard(member: BucketMember, states: list[torch.Tensor]) -> bool:
    """Give a parameter, and tensors of its optimizer state, the classes above.

    Returns:
        Whether its reads show; otherwise something in C++ refers weakly to it.
    """
    parameter = member.parameter
    before = _guarded.get(id(parameter))
    if before is not None and before is not member:
        before.owner.touch(before)  # another model's
    tensors: list[torch.Tensor] = [parameter]
    if not _exchange(member):
        return False
    parameter.__class__ = PendingParameter
    for state in states:
        if type(state) is torch.Tensor:
            state.__class__ = PendingState
            tensors.append(state)
    member.guarded = tensors
    for tensor in tensors:
        _guarded[id(tensor)] = member
    return True


def _exchange(member: BucketMember) -> bool:
    """Let the parameter have its twin's implementation, and the twin its own."""
    twin = member.twin
    if twin is None:
        with torch.enable_grad(), plainly():
            make: Any = _MakeTwin.apply
            twin = member.twin = make(member.parameter)
        # An address that is read in spite of everything is an error, not a crash.
        torch._C._set_throw_on_mutable_data_ptr(twin)  # noqa: SLF001
        twin.parameter = member.parameter
    if member.swapped is None:
        try:
            _swap(member.parameter, twin)
        except RuntimeError:
            return False
    twin.__class__ = PendingParameter
    _guarded[id(twin)] = member
    member.swapped = twin
    return True


def exchange_back(member: BucketMember) -> None:
    """Give a parameter its own implementation back, while it keeps its class."""
    twin = member.swapped
    if twin is not None:
        try:
            _swap(member.parameter, twin)
        except RuntimeError:
            _held.add(id(member.parameter))
            twin.__class__ = nn.Parameter
            _guarded.pop(id(twin), None)
            return
        _held.discard(id(member.parameter))
        twin.__class__ = Twin
        _guarded.pop(id(twin), None)
        member.swapped = None


def unguard(member: BucketMember) -> None:
    """Give them their own classes back."""
    exchange_back(member)
    if member.swapped is not None:
        return
    for tensor in member.guarded:
        _guarded.pop(id(tensor), None)
        if type(tensor) is PendingParameter:
            tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        elif type(tensor) is PendingState:
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]
    member.guarded = []
