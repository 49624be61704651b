"""Tensors whose values may be read only while their owner allows it.

# Note [Guarded parameters]
The class of such a parameter is replaced by a subclass whose ``__torch_function__``
intercepts every operation. Overwriting a value and asking for shapes, types and
gradients is allowed, so that optimizers and ``load_state_dict`` work. Buffers that
forward changes, such as running statistics, are guarded in the same way; other buffers
are not.

A program may keep the module when the burst model is gone, for example after a function
that trains. Then `Leftover` says whether the values are current.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn

from stretto.burst.memory import tensors_among
from stretto.burst.tracing.replaced import own_function
from stretto.burst.tracing.source_lines import line_of_program
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

_READING = frozenset(
    getattr(torch.Tensor, name)
    for name in ("data", "T", "mT", "H", "mH", "real", "imag")
)
"""Attributes that return values; all others return facts about the tensor."""

_GRAD: Any = torch.Tensor.grad

_FACTS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size"),
        *("storage_offset", "is_contiguous", "is_floating_point", "is_complex"),
        *("is_signed", "is_set_to", "is_same_size", "is_shared", "is_inference"),
        *("is_conj", "is_neg", "_is_view", "has_names", "get_device", "data_ptr"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
        *("share_memory_", "_has_compatible_shallow_copy_type"),
        *("retain_grad", "__len__", "__hash__", "__repr__", "__str__", "__format__"),
        *("grad", "backward"),  # of autograd, see `boundary`
        *("new", "new_zeros", "new_empty", "new_ones", "new_full", "zeros_like"),
        *("empty_like", "ones_like", "full_like", "rand_like", "randn_like"),
    )
)

_WRITES = frozenset(
    (
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "set_", "__set__"),
        *("constant_", "kaiming_uniform_"),  # of torch.nn.init
    )
)
_IN_PLACE = frozenset(
    (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("__idiv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__"),
        *("__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    )
)
_CONVERSIONS = frozenset(
    (
        *("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16"),
        *("contiguous", "resolve_conj", "resolve_neg"),
    )
)
"""Return the tensor itself if it has the type and device already."""

_ALIASES = frozenset(("view_as", "expand_as"))
"""They return another tensor for one and itself, with a node of its own in autograd."""

_CALLS = frozenset(("apply_", "map_", "map2_"))
"""Work in place, but pass values to a function of the program."""

_PRODUCTS = frozenset(("matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "einsum"))


class Owner(Protocol):
    """Decides what may be done with guarded tensors, and raises for anything else.

    ``values`` are the tensors that are read or changed, in lists and tuples.
    """

    def check_reading(self, values: Any, *, is_of_all: bool = False) -> None:
        """Require that tensors may be read, by a layer's operation or another."""

    def check_change(self, values: Any, *, is_by_values: bool) -> None:
        """Require that tensors may be changed in place, by other tensors or not."""

    def note_gradient(self, parameter: nn.Parameter, caller: FrameType) -> None:
        """Record that code asks for a gradient, or sets it."""


@final
class Leftover:
    """State of guarded tensors that outlives their owner."""

    def __init__(self) -> None:
        self.is_stale = False
        self._rank = ""
        self._layers: list[tuple[str, list[weakref.ref[torch.Tensor]]]] = []

    def hold(
        self, rank: str, layers: Iterable[tuple[str, Sequence[torch.Tensor]]]
    ) -> None:
        """Record the name of this rank, and the layers whose values it may not have."""
        self._rank = rank
        self._layers = [(name, list(map(weakref.ref, each))) for name, each in layers]

    def missing(self, values: Any) -> str:
        """Return which layer of those that these tensors belong to does not run here.

        If they belong to none, the first layer with parameters.
        """
        layer_of = {
            id(tensor): name
            for name, refs in reversed(self._layers)
            for ref in refs
            if (tensor := ref()) is not None
        }
        for tensor in tensors_among(values):
            base = tensor._base  # noqa: SLF001
            name = layer_of.get(id(tensor)) or layer_of.get(id(base))
            if name is not None:
                return self._without(name)
        with_parameters = (
            name
            for name, refs in self._layers
            if any(isinstance(ref(), nn.Parameter) for ref in refs)
        )
        return self._without(next(with_parameters, self._layers[0][0]))

    def _without(self, layer: str) -> str:
        return f"{self._rank} does not run layer {layer!r}"

    def check(self, values: Any) -> None:
        """Require that tensors' values are current.

        Raises:
            StrettoError: naming a layer of which they are not.
        """
        if self.is_stale:
            raise StrettoError(
                f"{line_of_program()}{self.missing(values)} and has no current "
                "parameters of it, and the burst model that trained it was deleted: "
                "let all ranks call full_state_dict() or refresh() while it exists, "
                "after the last optimizer.step()"
            )


def guards_of(owner: Owner, leftover: Leftover) -> tuple[Any, Any]:
    """Return classes of parameters and buffers that ask their owner before a read."""
    ref = weakref.ref(owner)

    def guarded(
        _cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = own_function(func)
        attribute = getattr(func, "__self__", None)
        if attribute is _GRAD:
            owner = ref()
            if owner is not None:
                owner.note_gradient(args[0], sys._getframe(1))  # noqa: SLF001
        elif func.__name__ in _ALIASES and args[0] is args[-1]:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                alias = func(*args)
            alias.__class__ = GuardedBuffer
            return alias
        elif func.__name__ in _CONVERSIONS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                found = func(*args, **(kwargs or {}))
            if found is not args[0]:
                _require_allowed(func, types, args, kwargs)
            return found
        elif func.__name__ != "__get__" or attribute in _READING:
            _require_allowed(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **(kwargs or {}))

    class GuardedParameter(nn.Parameter):
        """A parameter of a layer that this rank does not run."""

        stretto_owner = ref
        stretto_leftover = leftover
        __torch_function__ = classmethod(guarded)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                _check_copying(self)
                values = self.data.clone(memory_format=torch.preserve_format)
                memo[id(self)] = nn.Parameter(values, self.requires_grad)
            found: nn.Parameter = memo[id(self)]
            return found

    class GuardedBuffer(torch.Tensor):
        """A buffer of a layer that this rank does not run."""

        stretto_owner = ref
        stretto_leftover = leftover
        __torch_function__ = classmethod(guarded)

        def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
            if id(self) not in memo:
                _check_copying(self)
                memo[id(self)] = self.clone(memory_format=torch.preserve_format)
            found: torch.Tensor = memo[id(self)]
            return found

        def __reduce_ex__(self, protocol: Any) -> Any:
            # A plain tensor; saving counts as reading.
            return self.detach().__reduce_ex__(protocol)

    GuardedParameter.__name__ = GuardedParameter.__qualname__ = "Parameter"
    GuardedBuffer.__name__ = GuardedBuffer.__qualname__ = "Tensor"
    return GuardedParameter, GuardedBuffer


def _check_copying(tensor: torch.Tensor) -> None:
    _check_reading(type(tensor), [tensor], is_of_all=True)


def _check_reading(kind: Any, values: Any, *, is_of_all: bool) -> None:
    """Require that tensors may be read of which some have this guarded class."""
    owner = kind.stretto_owner()
    if owner is None:
        kind.stretto_leftover.check(values)
    else:
        owner.check_reading(values, is_of_all=is_of_all)


def require_current(tensors: Iterable[torch.Tensor]) -> None:
    """Require that tensors have no values that another burst model has elsewhere.

    Raises:
        StrettoError: one has.
    """
    values = list(tensors)
    for kind in {type(tensor) for tensor in values}:
        if hasattr(kind, "stretto_owner"):
            _check_reading(kind, values, is_of_all=True)


def plain_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return a tensor's class; of a guarded one, that which it had before."""
    kind = type(tensor)
    if not hasattr(kind, "stretto_owner"):
        return kind
    return nn.Parameter if issubclass(kind, nn.Parameter) else torch.Tensor


def _require_allowed(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    """Require that a call reads or changes no value that is not current.

    Operands of other models also reach the first one's class.

    Raises:
        StrettoError: it does.
    """
    name = getattr(func, "__name__", "")
    values: Any = (args, kwargs)
    targets = _targets(func, args)
    if targets is not None:
        values = (args[1:], kwargs)
        _check_change(targets, values)
        types = [type(each) for each in tensors_among(values)]
    elif name in _FACTS:
        return
    elif name in _WRITES:
        # If a counter is missing from a state, batch norms load it from itself.
        # Initializers give everything by name.
        named = kwargs or {}
        target = args[0] if args else named.get("tensor")
        values = [arg for arg in (*args, *named.values()) if arg is not target]
        types = [type(value) for value in values]
    for kind in types:
        if hasattr(kind, "stretto_owner"):
            _check_reading(kind, values, is_of_all=_computes(func))


def _targets(func: Any, args: Any) -> list[Any] | None:
    """Return the tensors that a call changes in place; None if it is another call."""
    name = getattr(func, "__name__", "")
    if name in _IN_PLACE or (
        name[-1:] == "_" != name[-2:-1]
        and name not in _FACTS
        and name not in _WRITES
        and name not in _CALLS
    ):
        if not args:
            return None
        return list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    return None


def _check_change(targets: Sequence[Any], operands: Any) -> None:
    is_by_values = any(True for _ in tensors_among(operands))
    for kind in {type(each) for each in targets}:
        if not hasattr(kind, "stretto_owner"):
            continue
        owner = kind.stretto_owner()
        if owner is None:
            kind.stretto_leftover.check(targets)
        else:
            owner.check_change(targets, is_by_values=is_by_values)


def _computes(func: Any) -> bool:
    """Return whether a call is one of a layer's operations."""
    name = getattr(func, "__name__", "")
    return name in _PRODUCTS or hasattr(torch.nn.functional, name)
