"""Pack several tensors with a row for each sample into one, because layers pass one.

Floats become the widest type among them, which is exact; integers beside floats keep
their bits. Gradients flow through floats.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stretto.burst.memory import in_memory
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from stretto.burst.tracing.graph_reach import GraphReach
    from stretto.burst.tracing.output_memory import RowView

    SampleKind = tuple[tuple[int, ...], torch.dtype]
    """Shape and type of one sample."""

_EXACT_BITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}
OUTPUTS = "output tensors"
"""The packed tensors' name in messages: they are packed after forward."""

_BITS = {torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """One tensor's place in a row."""

    shape: tuple[int, ...]
    """Shape of one sample."""

    dtype: torch.dtype

    start: int

    length: int
    """Range of numbers of the packed type."""

    as_bits: bool


@final
class Packing:
    """Places of tensors of given shapes and types in one; a single one is unchanged."""

    def __init__(self, kinds: Sequence[SampleKind], what: str) -> None:
        types = {dtype for _, dtype in kinds}
        floats = [t for t in types if t.is_floating_point]
        if len(kinds) == 1:
            self.dtype = kinds[0][1]
        elif floats:
            self.dtype = floats[0]
            for kind in floats[1:]:
                self.dtype = torch.promote_types(self.dtype, kind)
        else:
            self.dtype = torch.int64
        self.parts: list[RowPart] = []
        start = 0
        for shape, dtype in kinds:
            length = 1
            for side in shape:
                length *= side
            as_bits = self._as_bits(dtype, what)
            if as_bits:
                length = length * dtype.itemsize // self.dtype.itemsize
            self.parts.append(
                RowPart(
                    shape=shape,
                    dtype=dtype,
                    start=start,
                    length=length,
                    as_bits=as_bits,
                )
            )
            start += length

    def _as_bits(self, dtype: torch.dtype, what: str) -> bool:
        if dtype == self.dtype or (
            dtype.is_floating_point and self.dtype.is_floating_point
        ):
            return False
        if not self.dtype.is_floating_point and dtype in _BITS:
            return False
        if _BITS.get(dtype, 64) <= _EXACT_BITS.get(self.dtype, 0):
            return False
        if dtype.is_complex or self.dtype.is_complex:
            way = "pass complex ones as torch.view_as_real of them, and convert them in"
            where = "the model"
            if what == OUTPUTS:
                way, where = "give complex ones as torch.view_as_real of them", ""
            raise SpecError(
                f"{what} of types {dtype} and {self.dtype} can't be packed together: "
                f"{way} {where}".rstrip()
            )
        if dtype.itemsize % self.dtype.itemsize:
            raise SpecError(
                f"{what} of types {dtype} and {self.dtype} can't be packed together: "
                f"convert one of them to int64 or {self.dtype} outside of the model"
            )
        return True

    @property
    def is_one(self) -> bool:
        """Whether there is a single tensor."""
        return len(self.parts) == 1

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors as one."""
        if self.is_one:
            return tensors[0]
        rows = []
        for part, tensor in zip(self.parts, tensors, strict=True):
            flat = tensor.reshape(tensor.shape[0], _count(part.shape))
            if part.as_bits:
                flat = in_memory(flat).view(self.dtype)
            rows.append(flat.to(self.dtype))
        return torch.cat(rows, 1)

    def unpack(
        self,
        packed: Tensor,
        hook_of: Callable[[int], Callable[[Tensor], None]] | None = None,
    ) -> list[Tensor]:
        """Return the tensors; ``hook_of`` gives a hook for the gradient of each."""
        if self.is_one:
            return [packed]
        found = []
        for number, part in enumerate(self.parts):
            flat = packed[:, part.start : part.start + part.length]
            if not part.dtype.is_floating_point:
                flat = flat.detach()
            elif hook_of is not None and flat.requires_grad:
                flat.register_hook(hook_of(number))
            if part.as_bits:
                flat = flat.clone(memory_format=torch.contiguous_format)
                flat = flat.view(part.dtype)
            else:
                flat = flat.to(part.dtype)
            # Contiguous as the caller's: programs use view() and write in place.
            flat = flat.contiguous()
            found.append(flat.view(packed.shape[0], *part.shape))
        return found


def _to_rows(tensors: Sequence[Tensor]) -> str:
    """Return how to give inputs a row for each sample."""
    count = tensors[0].shape[0]
    second = {tensor.shape[1] if tensor.dim() > 1 else -1 for tensor in tensors}
    if len(second) == 1 and -1 not in second:
        return (
            f"if the {second.pop()} in dimension 1 are the samples, pass each with the "
            "samples first, x.transpose(0, 1), and transpose it back in forward (or "
            "create recurrent modules with batch_first=True); outputs too"
        )
    others = [tensor for tensor in tensors if tensor.shape[0] != count]
    if any(tensor.shape[1:2] == (count,) for tensor in others):
        return (
            f"where the {count} samples are in dimension 1, as in a recurrent "
            "module's state, pass and return it with the samples first, and give the "
            "module state.transpose(0, 1).contiguous() in forward"
        )
    if any(t.shape[0] == 2 and not t.is_floating_point() for t in others):
        return (
            "keep what all samples share in the model, as a buffer. If it lists the "
            "edges of a graph whose nodes are the samples, they can't be on different "
            "ranks: let each sample be a whole graph, with inputs (graphs, nodes, "
            "features) and (graphs, nodes, nodes)"
        )
    return "keep what all samples share in the model, as a buffer"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


@final
class Arguments:
    """Which of a model's arguments are tensors with rows, and the values of others."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any],
    ) -> None:
        """Prepare for calls of ``forward`` with arguments like these."""
        self._signature = _signature_of(forward)
        kwargs = self._in_order(kwargs)
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        self._others = [None if isinstance(v, Tensor) else v for v in leaves]
        self._described = self._described_by_name(args, kwargs)
        tensors = [leaves[i] for i in self._places]
        if not tensors:
            raise SpecError(
                "a model must have an input tensor with a row for each sample, but "
                "there is no tensor: pass one in example_inputs"
            )
        for tensor in tensors:
            if tensor.dim() < 1:
                raise SpecError(
                    "the example input needs a row for each sample, got a scalar: "
                    "keep a number in an attribute of the model that forward reads"
                )
        if len({tensor.shape[0] for tensor in tensors}) > 1:
            code = getattr(inspect.unwrap(forward), "__code__", None)
            line = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise SpecError(
                f"{line}every input tensor must have a row for each sample, got shapes "
                f"{shapes}: {_to_rows(tensors)}"
            )
        self.pair_of_samples = next(
            (
                tuple(t.shape)
                for t in tensors
                if t.shape[0] > 1 and t.shape[0] in t.shape[1:2]
            ),
            None,
        )
        """The shape of an input whose first two dimensions have a size for each sample,
        if there is one."""
        self.packing = Packing(
            [(tuple(t.shape[1:]), t.dtype) for t in tensors], "input tensors"
        )
        self.device = tensors[0].device

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a call's input tensors as one.

        Raises:
            SpecError: other arguments differ from those of the example.
        """
        leaves, spec = self._flattened(args, kwargs)
        places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        tensors = [leaves[i] for i in places]
        others = [None if isinstance(v, Tensor) else v for v in leaves]
        known = spec == self._spec and places == self._places
        if not known or not _same(others, self._others):
            raise SpecError(
                "the model was called with other arguments than the example's: "
                f"{self._first_other(args, kwargs)}. Pass the same keywords, flags and "
                "numbers, and as many tensors; keep a number that changes between "
                "steps in an attribute of the model that forward reads"
            )
        for tensor in tensors:
            if tensor.device.type != self.device.type:
                raise SpecError(
                    f"an input is on {tensor.device}, and the example was on "
                    f"{self.device}: move it there, or see what "
                    "torch.set_default_device is set to"
                )
        rows = {t.shape[0] if t.dim() else -1 for t in tensors}
        kinds = [(tuple(t.shape[1:]), t.dtype) for t in tensors]
        wanted = [(part.shape, part.dtype) for part in self.packing.parts]
        if not self.packing.is_one and kinds != wanted:
            raise SpecError(
                f"samples must have the example's shapes and types {wanted}, got "
                f"{kinds}. {advice_on_samples(kinds, wanted)}"
            )
        if not self.packing.is_one and len(rows) > 1:
            raise SpecError(
                "all inputs must have one number of samples, got "
                f"{', '.join(map(str, sorted(rows)))}"
            )
        return self.packing.pack(tensors)

    def _described_by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, str]:
        """Return what each argument is, by the places of its leaves."""
        known = self._signature.parameters if self._signature is not None else {}
        named = dict(zip(known, args, strict=False))
        more = {str(i): arg for i, arg in enumerate(args) if i >= len(known)}
        values = {
            name: one.default
            for name, one in known.items()
            if one.default is not one.empty
        }
        given = {**values, **named, **more, **kwargs}
        leaves: list[Any] = pytree.tree_flatten_with_path(given)[0]
        empty = {
            name: f"an empty {type(value).__name__}"
            for name, value in given.items()
            if not pytree.tree_leaves(value)
        }
        return empty | {
            f"{path[0].key}{pytree.keystr(path[1:])}": (
                "a tensor" if isinstance(leaf, Tensor) else repr(leaf)[:80]
            )
            for path, leaf in leaves
        }

    def _first_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        now, was = self._described_by_name(args, kwargs), self._described
        for name in (*was, *now):
            if now.get(name) != was.get(name):
                here, there = now.get(name, "left out"), was.get(name, "left out")
                return f"{name!r} is {here}, and was {there}"
        return "their types differ"

    def _in_order(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments in the order of the signature."""
        names = self._signature.parameters if self._signature is not None else {}
        first = {name: kwargs[name] for name in names if name in kwargs}
        return {**first, **kwargs}

    def _flattened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], Any]:
        """Return a call's leaves and structure, in the form of the example if it fits.

        Arguments may be given by position or by name, in any order, and those that have
        their default value may be left out.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self._spec or self._signature is None:
            return leaves, spec
        form = pytree.tree_unflatten(self._others, self._spec)
        found = _as_called(self._signature, form, (args, kwargs))
        return (leaves, spec) if found is None else pytree.tree_flatten(found)

    def mapped(
        self,
        change: Callable[[Tensor], Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with each tensor changed."""
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = pytree.tree_map_only(Tensor, change, (args, kwargs))
        return found

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among a call's arguments, in the order of packing."""
        leaves, _ = self._flattened(args, kwargs)
        return [v for v in leaves if isinstance(v, Tensor)]

    def unpack(self, packed: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments."""
        leaves = list(self._others)
        for i, tensor in zip(self._places, self.packing.unpack(packed), strict=True):
            leaves[i] = tensor
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = pytree.tree_unflatten(leaves, self._spec)
        return found


def _signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):  # written in C
        return None


def _by_name(signature: inspect.Signature, call: Any) -> dict[str, Any] | None:
    """Return a call's arguments by name; None if they don't fit."""
    args, kwargs = call
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _as_called(signature: inspect.Signature, form: Any, call: Any) -> Any:
    """Return a call's arguments in the form of another call; None if they differ."""
    wanted, given = _by_name(signature, form), _by_name(signature, call)
    if wanted is None or given is None:
        return None
    for name in {**given, **wanted}:
        parameter = signature.parameters.get(name)
        default = inspect.Parameter.empty if parameter is None else parameter.default
        if name not in given:
            given[name] = default
        elif name not in wanted and not _same([given[name]], [default]):
            return None
    if any(given[name] is inspect.Parameter.empty for name in wanted):
        return None
    positions = list(signature.bind(*form[0], **form[1]).arguments.items())
    args: list[Any] = []
    for name, value in positions:
        kind = signature.parameters[name].kind
        if len(args) == len(form[0]):
            break
        if kind is inspect.Parameter.VAR_POSITIONAL:
            args += _like(given[name], value)
        else:
            args.append(_like(given[name], value))
    kwargs = {name: _like(given[name], value) for name, value in form[1].items()}
    return tuple(args), kwargs


def _like(value: Any, form: Any) -> Any:
    """Return a value with dictionaries in the order of another one's."""
    if type(value) is not type(form):
        return value
    if type(value) is dict and value.keys() == form.keys():
        return {key: _like(value[key], inner) for key, inner in form.items()}
    if type(value) in (tuple, list) and len(value) == len(form):
        return type(value)(map(_like, value, form))
    return value


def _same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        a is b or (type(a) is type(b) and bool(a == b))
        for a, b in zip(one, two, strict=True)
    )


@final
class PackedResults:
    """A model's result: which of its leaves are tensors with rows."""

    def __init__(self, output: Any, place: str, inputs: Sequence[Tensor]) -> None:
        leaves, self._rebuild = _taken_apart(output)
        self._structure = type(output), pytree.tree_structure(output)
        self._places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        self.others = [None if isinstance(v, Tensor) else v for v in leaves]
        """The values of leaves that are not tensors."""

        self.tensors: list[Tensor] = [leaves[i] for i in self._places]
        if not self.tensors:
            kind = f" but {type(output).__name__}" if output is not None else ""
            raise SpecError(
                f"{place}: the model gives no tensor{kind}: it must give tensors with "
                "a row for each sample, alone or in tuples, lists, dictionaries or "
                "dataclasses"
            )
        ids = [id(tensor) for tensor in self.tensors]
        self._same_as = [ids.index(one) for one in ids]
        """For each tensor, the first that is the same object."""

        self.inputs = inputs
        """The tensors with which the model was called."""

        self.views: list[RowView | None] = [None] * len(ids)
        """For each tensor, how it shares memory, see `output_memory`."""

        self.packing: Packing | None = None
        self.output_parameters: tuple[frozenset[str], ...] | None = None
        """For each tensor, names of the parameters that its gradient reaches; ``None``
        if each reaches all."""

        self.trial_values = "elements"
        """How inputs are made with which the model can compute, see `trial.VALUES`."""

    def description(self) -> tuple[Any, ...]:
        """Return what the result is besides its tensors, to be compared."""
        return self._structure, self._places, self._same_as, self.others

    @property
    def differs(self) -> bool:
        """Whether gradients of different tensors reach different parameters."""
        return (
            self.output_parameters is not None and len(set(self.output_parameters)) > 1
        )

    def correct(
        self, never: frozenset[str], module: nn.Module, graphs: Sequence[GraphReach]
    ) -> None:
        """Correct what operations show by the module's own gradients.

        Args:
            never: names of parameters that no output's gradient reaches.
            module: the model.
            graphs: what the module's graph of each of several outputs reaches. It lacks
                parameters that are frozen at present.
        """
        names = frozenset(name for name, _ in module.named_parameters())
        trained = _trained_in(module)
        reached = self.output_parameters or (names,) * len(self.tensors)
        if len(graphs) == len(reached):
            reached = self._with_views(
                [
                    (some - trained if graph.is_complete else some) | graph.names
                    for some, graph in zip(reached, graphs, strict=True)
                ]
            )
        if not trained.difference(*reached) <= never:
            reached = (names,) * len(self.tensors)
        found = tuple(some - never for some in reached)
        # Ranks join what was reached only where this differs.
        self.output_parameters = None if {*found} == {names} else found

    def unreached(self, module: nn.Module) -> frozenset[str]:
        """Return names of parameters that are trained and that no output reaches."""
        if self.output_parameters is None:
            return frozenset()
        return _trained_in(module).difference(*self.output_parameters)

    @property
    def shows_inputs(self) -> bool:
        """Whether a tensor is an input, or a part of one."""
        return any(view is not None and view.of_input for view in self.views)

    def share_memory(self, views: list[RowView | None]) -> None:
        """Make tensors as views of others from now on.

        A gradient of a view arrives as one of what it is a view of.
        """
        self.views = views
        if self.output_parameters is not None:
            self.output_parameters = self._with_views(self.output_parameters)

    def _with_views(
        self, reached: Sequence[frozenset[str]]
    ) -> tuple[frozenset[str], ...]:
        """Add what a view's gradient reaches to what it is a view of."""
        found = list(reached)
        for view, own in zip(self.views, reached, strict=True):
            if view is not None and not (view.of_input or view.is_detached):
                found[view.number] |= own
        return tuple(found)

    def packed(self, output: Any, rows: int) -> Tensor:
        """Return the result's tensors as one; the first call records their shapes."""
        tensors = tensors_in(output)
        for tensor in tensors:
            if tensor.dim() < 1 or tensor.shape[0] != rows:
                return tensors[0] if len(tensors) == 1 else tensor
        self.packing = Packing(
            [(tuple(t.shape[1:]), t.dtype) for t in tensors], OUTPUTS
        )
        return self.packing.pack(tensors)

    def unpack(
        self,
        packed: Tensor,
        hook_of: Callable[[int], Callable[[Tensor], None]] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> Any:
        """Return the result as the model gives it.

        ``hook_of`` gives a hook for the gradient of each of several tensors; ``inputs``
        are the tensors of the call.
        """
        assert self.packing is not None  # noqa: S101
        leaves = list(self.others)
        found = self.packing.unpack(packed, hook_of)
        for i, view in enumerate(self.views):
            if view is None:
                continue
            base = (inputs if view.of_input else found)[view.number]
            found[i] = view.made(base, found[i])
        for i, first in zip(self._places, self._same_as, strict=True):
            leaves[i] = found[first]  # programs write in place into outputs
        return self._rebuild(leaves)


def _trained_in(module: nn.Module) -> frozenset[str]:
    return frozenset(n for n, p in module.named_parameters() if p.requires_grad)


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors of a model's result, in the order of packing."""
    return [v for v in _taken_apart(output)[0] if isinstance(v, Tensor)]


def _taken_apart(output: Any) -> tuple[list[Any], Any]:
    """Return the leaves, and a function that rebuilds the output from other leaves."""
    if hasattr(output, "to_tuple") and isinstance(output, dict):
        return _taken_apart_by_key(output, lambda values: type(output)(**values))
    if _is_dataclass(output):
        names = [f.name for f in dataclasses.fields(output) if hasattr(output, f.name)]
        held = {name: getattr(output, name) for name in names}
        return _taken_apart_by_key(held, lambda values: _replaced(output, values))
    leaves, spec = pytree.tree_flatten(output, is_leaf=_is_dataclass)
    if any(map(_is_dataclass, leaves)):
        inner = dict(enumerate(leaves))
        return _taken_apart_by_key(
            inner, lambda values: pytree.tree_unflatten(values.values(), spec)
        )
    kept = [
        v if v is None or isinstance(v, (*_KEPT, Withheld)) else Withheld(v)
        for v in leaves
    ]
    return kept, lambda some: pytree.tree_unflatten(some, spec)


_KEPT = (
    *(Tensor, int, float, complex, str, bytes, enum.Enum, type),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types that a caller may get from a model's output."""


@final
class WithheldError(StrettoError, AttributeError):
    """Something uses an output that a burst model does not give.

    It is an ``AttributeError`` too, so that ``hasattr`` answers no.
    """


@final
class Withheld:
    """Is in an output in place of an object of another kind, such as a cache.

    A program may pass it on. Using it raises an error, because layers on other ranks do
    not fill the object.
    """

    def __init__(self, value: Any) -> None:
        self._kind: str = type(value).__name__

    def __eq__(self, other: object) -> bool:
        return type(other) is Withheld and other._kind == self._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def __repr__(self) -> str:
        return f"<{self._kind} that a burst model does not give>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_kind":  # such as copy.copy asks for
            raise AttributeError(name)
        raise self._error()

    def __len__(self) -> int:
        raise self._error()

    def __iter__(self) -> Any:
        raise self._error()

    def __getitem__(self, key: Any) -> Any:
        raise self._error()

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise an error: the object is not here."""
        raise self._error()

    def __bool__(self) -> bool:
        return True

    def _error(self) -> WithheldError:
        return WithheldError(
            f"the burst model's output has an object of {self._kind} here, which "
            "holds nothing on this rank, as layers ran on others: return its tensors, "
            "or call the model without it (such as use_cache=False)"
        )


def _taken_apart_by_key(
    held: Mapping[Any, Any], make: Callable[[dict[Any, Any]], Any]
) -> tuple[list[Any], Any]:
    """Return the leaves of values, and a function that makes the output of others."""
    parts = {key: _taken_apart(value) for key, value in held.items()}

    def rebuild(leaves: list[Any]) -> Any:
        found, at = {}, 0
        for key, (inner, rebuild_inner) in parts.items():
            found[key] = rebuild_inner(leaves[at : at + len(inner)])
            at += len(inner)
        return make(found)

    return [leaf for inner, _ in parts.values() for leaf in inner], rebuild


def _is_dataclass(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not hasattr(value, "to_tuple")
    )


def _replaced(value: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with other values, without calling its code."""
    found = copy.copy(value)
    for name, new in fields.items():
        object.__setattr__(found, name, new)  # it may be frozen
    return found


def advice_on_samples(kinds: Sequence[SampleKind], wanted: Sequence[SampleKind]) -> str:
    """Return what to do with samples of another shape or type than the example's."""
    if [shape for shape, _ in kinds] == [shape for shape, _ in wanted]:
        return "Convert inputs to the example's type, as with Tensor.to()"
    return "Pad samples to the example's length, and mask the padding in the loss"
