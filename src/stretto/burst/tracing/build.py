"""Build a graph from the records of both batches."""

from __future__ import annotations

import operator
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from stretto.burst.tracing.comparing import BATCHES, BatchCount
from stretto.burst.tracing.copied_norms import plain_norm
from stretto.burst.tracing.dropout_rows import (
    as_before,
    by_sample,
    fold_of,
    require_rows,
)
from stretto.burst.tracing.inner_calls import mixing
from stretto.burst.tracing.names import Name, free_name, new_graph
from stretto.burst.tracing.own_rows import own_rows
from stretto.burst.tracing.records import SOURCE, Fixed, Record, Recording, Ref
from stretto.burst.tracing.torch_modules import PLAIN_DROPOUTS, Dropout
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.burst.tracing.ordering import Order

_DROPOUTS: dict[Any, Any] = {
    getattr(functional, name): kind for name, kind in PLAIN_DROPOUTS.items()
} | {torch.dropout: PLAIN_DROPOUTS["dropout"]}


# The graph.


class Build:
    """Makes a graph from records."""

    def __init__(
        self,
        module: nn.Module,
        recording: Recording,
        names: Mapping[str, str],
        tables: frozenset[str],
    ) -> None:
        self.graph = new_graph()
        self.shapes: dict[fx.Node, tuple[Any, Any]] = {}
        self.counts: dict[fx.Node, int] = {}
        self.source = self.graph.placeholder("batch")
        self._module = module
        self._constants = recording.constants
        self._names = {old: free_name(new, module) for old, new in names.items()}
        self._tables = tables
        self._targets: dict[str, Any] = {}
        self._nodes: dict[Any, fx.Node] = {SOURCE: self.source}
        self._number = 0

    def root(self) -> fx.GraphModule:
        """Return all operations as one module that holds the original's parts."""
        self._rename_beside_modules()
        root = fx.GraphModule(self._targets, self.graph, type(self._module).__name__)
        root.training = self._module.training
        return root

    def _rename_beside_modules(self) -> None:
        """Give new names to plain tensors of modules that are called.

        fx would register them as buffers of these modules.
        """
        for node in self.graph.find_nodes(op="get_attr"):
            old = str(node.target)
            path, _, last = old.rpartition(".")
            held = self._targets.get(path)
            if isinstance(held, nn.Module) and last in vars(held):
                new = free_name(f"tensor_{len(self._names)}_{last}", self._module)
                self._names[old], node.target = new, Name(new)
                self._targets[new] = self._targets.pop(old)

    def node(self, name: Ref | Fixed) -> fx.Node:
        """Return the node of a tensor."""
        if name not in self._nodes:
            if isinstance(name, Fixed):
                target = self._names.get(name.name, name.name)
                made = self.graph.get_attr(Name(target))
                self._targets[target] = self.held(name.name)
            else:
                before = self.node(Ref(name.number, name.path[:-1]))
                made = self.graph.call_function(
                    operator.getitem, (before, name.path[-1])
                )
                made.meta |= {**before.meta, "draws": False, "writes": None}
                made.meta |= {"norms": (), "keeps_state": False}
            self._nodes[name] = made
        return self._nodes[name]

    @property
    def constants(self) -> frozenset[str]:
        """Names in the graph of tensors that no module holds."""
        return frozenset(self._names.values())

    def known(self, name: Ref | Fixed | None) -> fx.Node | None:
        """Return the node of a tensor, if the graph has one."""
        node = self._nodes.get(name)
        return node if node in list(self.graph.nodes) else None

    def held(self, name: str) -> Any:
        """Return a tensor or object that the module holds, or that no module holds."""
        if name in self._constants:
            return self._constants[name]
        path, _, last = name.rpartition(".")
        return getattr(self._module.get_submodule(path), last)

    def add(
        self, number: int, one: Record, two: Record, args: Any, kwargs: Any
    ) -> None:
        """Add an operation; ``two`` is the same with the other batch."""
        dropout = self._dropout(one, args, kwargs)
        mixes = None if one.norms else mixing(one.inner, two.inner, BATCHES)
        if dropout is not None:
            name, module = dropout
            self._targets[name] = module
            given = args[0] if args else kwargs["input"]
            node = self._dropped(one, two, self._value(given), name, module)
        else:
            target = one.target
            if one.kind == "call_module":
                self._targets[target] = plain_norm(self._module.get_submodule(target))
                target = Name(target)
            elif one.kind == "call_function" and not _is_importable(target):
                target = _forwarding(target)
            if mixes is not None and mixes.by_index:
                args, is_checked = self._checked_index(one, two, args)
                if is_checked:
                    mixes = mixing(one.inner, two.inner, BATCHES, indexes=False)
            args = self._squeezed(one, args, kwargs)
            if one.target not in _FROM_DATA:
                args, kwargs = pytree.tree_map(_plain_number, (args, kwargs))
            node = self.graph.create_node(
                one.kind, target, self._value(args), self._value(kwargs)
            )
        is_function = dropout is not None and one.kind == "call_function"
        node.meta |= {
            "place": one.place,
            "context": one.context,
            "draws": one.draws and not is_function,
            "writes": None if is_function else one.writes,
            "aliases": one.aliases or node.target is as_before,
            "norms": tuple(n for n in one.norms if n not in self._tables),
            "keeps_state": one.keeps_state or self._updates_table(one),
            "borrowed": one.borrowed,
            "mixes": mixes,
        }
        self._number += 1
        self._nodes[Ref(number)] = node
        for path, tensor in one.tensors.items():
            made = self.node(Ref(number, path))
            self.shapes[made] = (tensor, two.tensors[path])

    def _squeezed(self, one: Record, args: Any, kwargs: Any) -> Any:
        """Name the dimensions of ``x.squeeze()``: a rank may have one sample.

        What forward does with one sample in all is another recording.
        """
        if one.target not in _SQUEEZES or len(args) != 1 or kwargs:
            return args
        name = args[0]
        shapes = self.shapes.get(self.node(name)) if isinstance(name, Ref) else None
        if shapes is None:
            return args
        sizes = zip(*(tensor.shape for tensor in shapes), strict=True)
        return name, tuple(i for i, both in enumerate(sizes) if both == (1, 1))

    def _checked_index(
        self, one: Record, two: Record, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], bool]:
        """Let computed indexes into the samples' rows be checked at each step.

        Return the operation's arguments, and whether all these indexes are checked.
        """
        found = _indexes_of(one, args)
        given = self.shapes.get(self.node(args[0])) if found is not None else None
        if found is None or given is None:
            return args, False
        made: dict[int, fx.Node] = {}
        for place, dim in found.items():
            there = _each(given, dim)
            index = args[1][place] if isinstance(args[1], tuple) else args[place]
            shapes = self.shapes.get(self.node(index))
            if not there or shapes is None:
                continue
            sides = [i for i in range(shapes[0].dim()) if _each(shapes, i)]
            if shapes[0].dtype is torch.bool or len(sides) != 1:
                return args, False
            here = _each(shapes, sides[0])
            node = self.graph.call_function(
                own_rows, (self.node(index), sides[0], here, there, one.place)
            )
            node.meta |= self.node(index).meta
            node.meta |= _added_beside(one, aliases=True)
            self.shapes[node] = shapes
            made[place] = node
        if isinstance(args[1], tuple):
            indexes = tuple(made.get(i, index) for i, index in enumerate(args[1]))
            return (args[0], indexes, *args[2:]), True
        return tuple(made.get(i, value) for i, value in enumerate(args)), True

    def _updates_table(self, one: Record) -> bool:
        """Return whether it updates statistics of what is the same for all samples."""
        norms = [self.held(name) for name in one.norms if name in self._tables]
        return any(norm.training and norm.track_running_stats for norm in norms)

    def _dropped(
        self, one: Record, two: Record, given: Any, name: str, module: nn.Module
    ) -> fx.Node:
        """Return the node of a dropout, whose masks are drawn for each sample.

        See Note [Rows for a dropout] in `dropout_rows`.
        """
        shapes = one.tensors[()], two.tensors[()]
        in_place = one.kind == "call_module" and one.writes is not None
        fold = None if in_place else fold_of(*shapes, module)
        if fold is None:
            for batch, tensor in zip(BATCHES, shapes, strict=True):
                require_rows(tensor, batch, one.place, module)
            return self.graph.call_module(Name(name), (given,))
        named: dict[str, Any] = {}
        if fold.drops_channels:
            named["drops_channels"] = True
        where = fold.side, fold.each
        rows = self.graph.call_function(by_sample, (given, *where), named)
        kept = self.graph.call_module(Name(name), (rows,))
        for node in (rows, kept):
            node.meta |= _added_beside(one, aliases=node is rows)
            both = [by_sample(x, *where, **named) for x in shapes]
            self.shapes[node] = both[0], both[1]
        back = {**named, "is_contiguous": shapes[0].is_contiguous()}
        return self.graph.call_function(as_before, (kept, *where), back)

    def _dropout(
        self, one: Record, args: Any, kwargs: Any
    ) -> tuple[str, nn.Module] | None:
        """Return an active dropout as a module, so that masks follow samples."""
        if one.kind == "call_module":
            held = self._module.get_submodule(one.target)
            if isinstance(held, Dropout) and held.training and held.p:
                return one.target, held
        kind = _DROPOUTS.get(one.target)
        if kind is None or one.kind != "call_function":
            return None
        names = ("input", "p", "train" if one.target is torch.dropout else "training")
        default = {"p": 0.5, "training": True}
        given = default | dict(zip(names, args, strict=False)) | kwargs
        if not given.get("train", given["training"]) or not given["p"]:
            return None
        made: nn.Module = kind(given["p"])
        return free_name(f"dropout_{self._number}", self._module), made.train()

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, (Ref, Fixed)):
            return self.node(value)
        if isinstance(value, BatchCount):
            return self._count(value.each)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._value(v) for v in value))
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._value(v) for v in value)
        if isinstance(value, dict):
            return {k: self._value(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self._value(getattr(value, e)) for e in _ENDS))
        if value is None or type(value) in _NUMBERS or isinstance(value, _PLAIN):
            return value
        name = free_name(f"value_{len(self._targets)}", self._module)
        self._targets[name] = value
        return self.graph.get_attr(name)

    def _count(self, each: int) -> fx.Node:
        node = self.graph.call_method("size", (self.source, 0))
        self.counts[node] = each
        return node


def _indexes_of(one: Record, args: tuple[Any, ...]) -> dict[int, int] | None:
    """Return which arguments of an operation index which dimensions, if known.

    Of several indexes in a tuple, their positions in it.
    """
    name = str(getattr(one.target, "__name__", one.target))
    if not args or not isinstance(args[0], (Ref, Fixed)):
        return None
    if name in ("__getitem__", "getitem", "set_item") and len(args) > 1:
        index = args[1]
        if isinstance(index, (Ref, Fixed)):
            return {1: 0}
        if isinstance(index, tuple) and all(
            isinstance(i, (Ref, Fixed, slice, int)) and not isinstance(i, bool)
            for i in index
        ):
            return {
                i: i for i, part in enumerate(index) if isinstance(part, (Ref, Fixed))
            }
    if name in ("gather", "index_select") and len(args) == 3:
        return {2: args[1]}
    return None


def _added_beside(one: Record, *, aliases: bool) -> dict[str, Any]:
    """Return what is known of an operation that forward itself does not have."""
    return {
        "place": one.place,
        "context": one.context,
        "draws": False,
        "writes": None,
        "aliases": aliases,
        "norms": (),
        "keeps_state": False,
        "borrowed": (),
        "mixes": None,
    }


def _each(shapes: tuple[Any, Any], dim: int) -> int:
    """Return how many elements of a dimension each sample has; 0 if it has none."""
    one, two = (tensor.shape[dim] for tensor in shapes)
    return int(one // BATCHES[0]) if one != two else 0


def _plain_number(value: Any) -> Any:
    """Return a number of NumPy, or of a class of its own, as Python's."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item()
    kinds: tuple[Any, ...] = _NUMBERS[:-1]
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


def _is_importable(target: Any) -> bool:
    """Return whether generated code can call a torch function by its qualified name."""
    if isinstance(target, types.MethodDescriptorType | types.WrapperDescriptorType):
        return getattr(Tensor, target.__name__, None) is target
    if (getattr(target, "__module__", None) or "").partition(".")[0] != "torch":
        return True  # fx refers to the object itself
    try:
        _, *names = fx.node._get_qualified_name(target).split(".")  # noqa: SLF001
        found: Any = torch
        for name in names:
            found = getattr(found, name)
    except (AttributeError, RuntimeError):
        return False
    return found is target


def _forwarding(target: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    call.__name__ = getattr(target, "__name__", "call")
    return call


_ENDS = ("start", "stop", "step")

_NUMBERS = (bool, int, float, complex, str)

_SQUEEZES = ("squeeze", torch.squeeze)
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions whose result has the type of a NumPy number that they are given."""

_PLAIN = (
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    type(...),
)


def graph_of(
    module: nn.Module,
    first: Recording,
    other: Recording,
    given: list[tuple[Any, Any]],
    order: Order,
    tables: frozenset[str],
) -> Build:
    """Return a graph of the operations that the output is computed from."""
    build = Build(module, first, order.constants, tables)
    for number in order.numbers:
        one, two = first.records[number], other.records[number]
        build.add(number, one, two, *given[number])
    if not isinstance(first.output, (Ref, Fixed)):
        raise SpecError(f"{type(module).__name__} gives no tensor")
    build.graph.output(build.node(first.output))
    for node in reversed(list(build.graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users:
            require_no_state(node, build)
            build.graph.erase_node(node)
    return build


def require_no_state(node: fx.Node, build: Build) -> None:
    """Refuse an operation without users that would update statistics or buffers."""
    changes = bool(node.meta.get("keeps_state"))
    also = ""
    for name in node.meta.get("norms", ()):
        norm = build.held(name)
        if norm.training and norm.track_running_stats:
            changes = True
            also = (
                "; or, if its statistics are not needed, set track_running_stats = "
                f"False of {name!r} before the model is captured"
            )
    if changes:
        raise SpecError(
            f"{node.meta['place']}: the output of {node.target} is not used, but it "
            "updates the module's buffers in each call. Layers that no output depends "
            "on are not run: leave out the call (in a loop over blocks, in the last "
            f"one), or use its output{also}"
        )
