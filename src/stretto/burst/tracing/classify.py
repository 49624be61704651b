"""Find which operations depend on the input, and which have a row for each sample.

A traced operation returns one of two: a *fixed* value, the same for any input (a
parameter, a mask); or a tensor computed from the input. Samples can move from one set
of ranks to another only at the latter, and only at those with a row for each sample.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn import functional

from stretto.burst.tracing.build import require_no_state
from stretto.burst.tracing.cached_values import CachedValues
from stretto.burst.tracing.caches import Cache, restored
from stretto.burst.tracing.comparing import BATCHES, Counts, follows
from stretto.burst.tracing.packing import Arguments, PackedResults
from stretto.burst.tracing.proven import Proven
from stretto.burst.tracing.reads import Ambient
from stretto.burst.tracing.recorder import set_item
from stretto.burst.tracing.rerun import Rerun
from stretto.burst.tracing.sample_positions import nodes_before, source_line_of
from stretto.burst.tracing.source_lines import line_of_forward
from stretto.burst.tracing.torch_modules import Dropout
from stretto.burst.tracing.watching import Watch
from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.burst.tracing.build import Build
    from stretto.burst.tracing.inner_calls import Mixing


NORMS = (
    nn.modules.batchnorm._NormBase,  # noqa: SLF001
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
"""Modules with parameters that cost little and so follow the layer they normalize."""

_HEAVY = {
    functional.linear,
    functional.embedding,
    functional.scaled_dot_product_attention,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.matmul,
    torch.bmm,
    torch.einsum,
    operator.matmul,
    "matmul",
    "__matmul__",
    "bmm",
}

_HALVES = (torch.float16, torch.bfloat16)
_SINGLES = (torch.float32, torch.complex64)

_RESHAPES = {"reshape", "view", "flatten", "to", "float", "double", "contiguous"}


@dataclass
class Traced:
    """The operations of a module on one input tensor."""

    root: fx.GraphModule

    ops: list[fx.Node]
    """Operations that return tensors computed from the input, in order; the last
    returns the model's output."""

    source: fx.Node
    """The input."""

    before: dict[fx.Node, list[fx.Node]]
    """For each of ``ops``, those of ``ops`` that it reads."""

    values: dict[fx.Node, Any]
    """Results of fixed operations that are not tensors: numbers, sizes, types."""

    counts: dict[fx.Node, int]
    """For a count that follows the batch: its value for one sample."""

    rows: set[fx.Node]
    """Nodes of ``ops`` that return one tensor with a row for each sample."""

    shapes: dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]
    """Shape of a sample, and type, of the source and of those in ``rows``."""

    module: nn.Module
    """The traced module."""

    arguments: Arguments

    results: PackedResults

    uses_half: bool
    """Whether some operation computes with fewer than 32 bits."""

    uses_single: bool
    """Whether some operation computes with 32 bits."""

    ambient: Ambient
    """The modes in which it was recorded."""

    watch: Watch
    """Plain state that its forward read."""

    counts_known: Counts
    """The numbers of samples for which its forward does this."""

    constants: frozenset[str]
    """Names of the tensors that no module holds."""

    proven: Proven | None = None
    """The facts that the last check of the layers depends on; None without one."""

    positions: set[fx.Node] = field(default_factory=set)
    """Nodes of ``ops`` whose rows are samples' positions in the batch."""

    caches: list[Cache] = field(default_factory=list)
    """The caches in which its forward keeps constants, as they were at capture."""

    cached: CachedValues | None = None
    """The values that it would keep there."""

    decided: frozenset[int] = frozenset()
    """The ids of tensors by whose values its forward decides."""

    leaves: list[bool] = field(default_factory=list)
    """Which modules ran as one operation."""

    rerun: Rerun | None = None
    """Runs its forward's code again; None if that can't be compared."""

    watch_of_layers: Watch | None = None
    """Values that its layers read or replace, if its forward reads all others."""

    without_gradient: str = ""
    """The line that reads that a tensor needs no gradient, unless the input does."""

    reads_layout: str = ""
    """The line that reads how a tensor lies in memory."""

    reads_offset: str = ""
    """The line that reads where in its storage a tensor begins."""

    names: set[str] | None = None
    """Names that forward may read of objects; None: it makes names while it runs."""

    semantics: list[tuple[str, str]] = field(default_factory=list)
    """For each operation a text with its constants, which is equal on all ranks, and
    its place in the user's code."""

    def outdated(self) -> str | None:
        """Return a value that forward read and that changed since, or None."""
        return self._changed(self.watch)

    def layers_outdated(self) -> str | None:
        """Return a value that changed and that forward's own code does not read."""
        return self._changed(self.watch_of_layers or self.watch)

    def _changed(self, watch: Watch) -> str | None:
        changed = watch.changed()
        if changed is None or not self.caches or self.cached is None:
            return changed
        with restored(self.caches):
            other = watch.changed()
        if other is None and self.cached.hold():
            return None
        return other or changed


def packed_shape(arguments: Arguments) -> tuple[int, ...]:
    """Return the shape of one sample of the packed input."""
    packing = arguments.packing
    if packing.is_one:
        return packing.parts[0].shape
    return (sum(part.length for part in packing.parts),)


def classify(
    module: nn.Module,
    build: Build,
    semantics: list[tuple[str, str]],
    arguments: Arguments,
    results: PackedResults,
    watch: Watch,
    counts_known: Counts,
) -> Traced:
    """Return the operations that depend on the input, checked one by one."""
    root = build.root()
    source = build.source
    traced = Traced(
        root=root,
        ops=[],
        source=source,
        before={},
        values={},
        counts=build.counts,
        rows={source},
        shapes={
            source: (packed_shape(arguments), arguments.packing.dtype),
        },
        module=module,
        arguments=arguments,
        results=results,
        uses_half=any(
            bool(node.meta["context"].autocast)
            for node in build.graph.nodes
            if "context" in node.meta
        )
        or any(one.dtype in _HALVES for one, _ in build.shapes.values()),
        uses_single=any(one.dtype in _SINGLES for one, _ in build.shapes.values()),
        ambient=Ambient.now(arguments.device),
        watch=watch,
        counts_known=counts_known,
        constants=build.constants,
        semantics=semantics,
    )
    ops = {source}
    (end,) = (node for node in build.graph.nodes if node.op == "output")
    result = end.args[0]
    used, drawn = nodes_before(result), set[fx.Node]()
    for node in build.graph.nodes:
        if node in (source, end) or node in build.counts:
            continue
        read = [n for n in node.all_input_nodes if n in ops]
        if not read:
            draws = bool(node.meta.get("draws"))
            node.meta["drops"] = not draws and _drops(node, root)
            if node.meta["drops"] or not drawn.isdisjoint(node.all_input_nodes):
                drawn.add(node)
                if node in used:
                    _require_same_for_all(node, build)
            elif draws:
                drawn.add(node)
                _require_same_for_all(node, build)
            continue
        if _is_constant(node, build, ops):
            continue
        _require_all_rows_written(traced, node)
        ops.add(node)
        traced.ops.append(node)
        traced.before[node] = [n for n in read if n is not source]
        if node in build.shapes:
            _row(traced, node, build)
        _require_apart_inside(node)
    _drop_unused(traced, build, result)
    if result not in traced.rows - {source}:
        name = type(module).__name__
        what = f"{source_line_of(result)}: this is an output of "
        if result.op == "placeholder":
            what = f"{line_of_forward(module)}an input is an output of "
        elif result.op == "get_attr":
            what = f"{line_of_forward(module)}{str(result.target)!r} is an output of "
        raise SpecError(
            f"{what}{name}, but its outputs need a row for each sample, computed from "
            f"its input: {_way_out(build.shapes.get(result))}"
        )
    return traced


def _way_out(shapes: tuple[Any, Any] | None) -> str:
    """Return how a model can give rows for samples in place of such an output."""
    if shapes is not None and all(tensor.dim() for tensor in shapes):
        each = {len(x) / batch for x, batch in zip(shapes, BATCHES, strict=True)}
        if len(each) == 1 and (rows := each.pop()) > 1 and rows.is_integer():
            return (
                f"this one has {int(rows)} for each. Return it with the samples as "
                "first dimension, and flatten it in the loss"
            )
    return "leave it out, or let a module around it return other outputs"


def _drop_unused(traced: Traced, build: Build, result: Any) -> None:
    """Drop operations of which only a type was read, see `_is_constant`."""
    for node in reversed(list(traced.ops)):
        if node is result or node.users:
            continue
        require_no_state(node, build)
        traced.ops.remove(node)
        del traced.before[node]
        traced.rows.discard(node)
        traced.shapes.pop(node, None)
        build.graph.erase_node(node)


def _is_constant(node: fx.Node, build: Build, ops: set[fx.Node]) -> bool:
    """Make ``x.new_zeros(3)``, ``c.to(x)`` and the like independent of ``x``."""
    name = str(node.target)
    if node.op != "call_method" or node not in build.shapes:
        return False
    one, two = build.shapes[node]
    if name in ("to", "type_as"):
        value, *others = node.args
        if value in ops or not others or others[0] not in ops:
            return False  # the value itself comes from the input
        node.target, node.args = "to", (value, one.device, one.dtype)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "other"}
        return True
    if name == "new_tensor" and not any(n in ops for n in node.all_input_nodes[1:]):
        node.op, node.target = "call_function", torch.tensor
        node.args = (node.args[1] if len(node.args) > 1 else node.kwargs["data"],)
        node.kwargs = {"dtype": one.dtype, "device": one.device}
        return True
    if name not in ("new_empty", "new_zeros", "new_ones", "new_full"):
        return False
    if one.shape != two.shape:
        return False
    node.op, node.target = "call_function", getattr(torch, name[4:])
    size = tuple(one.shape)
    fill = (node.kwargs.get("fill_value", node.args[-1]),) if "full" in name else ()
    node.args = (size, *fill)
    node.kwargs = {"dtype": one.dtype, "device": one.device}
    return True


def _require_all_rows_written(traced: Traced, node: fx.Node) -> None:
    """Refuse ``h[6:] = 0``: each rank would write other samples."""
    if node.target is not set_item or node.args[0] not in traced.rows:
        return
    index: Any = node.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        if first in (slice(None), slice(0, None), slice(None, None, 1)):
            return
    elif not isinstance(first, (int, list, range)) or isinstance(first, bool):
        return
    raise SpecError(
        f"{source_line_of(node)}: writes into some samples by their place in the "
        "batch, and these may be on other ranks. Treat all samples the same"
    )


def _drops(node: fx.Node, root: fx.GraphModule) -> bool:
    """Return whether an operation is a dropout that is active."""
    if node.op != "call_module":
        return False
    part = root.get_submodule(str(node.target))
    return isinstance(part, Dropout) and part.training and bool(part.p)


def _require_same_for_all(node: fx.Node, build: Build) -> None:
    """Require that random numbers are each sample's own.

    Args:
        node: does not read the input; draws, or is computed from what was drawn.
        build: all operations.
    """
    draws = node.meta.get("draws")
    one, two = build.shapes.get(node, (None, None))
    if one is None and not draws:
        _require_apart_inside(node)
        return  # a size, or several results
    if (
        one is None
        or one.shape == two.shape
        or (draws and one.shape[:1] == two.shape[:1])
    ):
        raise SpecError(
            f"{source_line_of(node)}: draws random numbers that all samples share, or "
            "not by samples, which would differ on each rank: draw them for each "
            "sample, with a first dimension that is the batch"
        )
    _side(node, build)
    _require_apart_inside(node)


def _row(traced: Traced, node: fx.Node, build: Build) -> None:
    """Record whether a tensor has a row for each sample."""
    value, _ = build.shapes[node]
    if _side(node, build) == 0 and value.shape[0] == BATCHES[0]:
        traced.rows.add(node)
        traced.shapes[node] = (tuple(value.shape[1:]), value.dtype)


def _side(node: fx.Node, build: Build) -> int:
    """Return the dimension of a tensor that follows the samples, and record it."""
    value, other = build.shapes[node]
    sides = [follows(v, w) for v, w in zip(value.shape, other.shape, strict=True)]
    if not any(side is not False for side in sides):
        raise SpecError(
            f"{source_line_of(node)}: {node.name!r} gives {tuple(value.shape)} "
            "whatever the number of samples: it mixes samples, which may be on "
            "different ranks. Leave reductions over the batch to the loss"
        )
    if any(side is None for side in sides) or sides.count(True) > 1:
        _refuse_pairs(build, node)
        raise SpecError(
            f"{source_line_of(node)}: {node.name!r} gives {tuple(value.shape)} for "
            f"{BATCHES[0]} samples and {tuple(other.shape)} for {BATCHES[1]}, which "
            "is not a multiple: it treats some samples differently from others, and "
            "these may be on other ranks. Treat all samples the same"
        )
    side = sides.index(True)
    node.meta["samples"] = side, value.shape[side] // BATCHES[0]
    return side


def _require_apart_inside(node: fx.Node) -> None:
    """Require that what an operation calls reads no other samples."""
    found: Mixing | None = node.meta.get("mixes")
    if found is not None:
        inner = "it" if found.operator in node.name else f"{found.operator!r} in it"
        raise SpecError(
            f"{found.place or source_line_of(node)}: {node.name!r} mixes samples: "
            f"{inner} {found.how}, and these may be on other ranks. Do it within each "
            "sample, or return what it is computed from and do it in the loss"
        )


def _refuse_pairs(build: Build, node: fx.Node) -> None:
    """Refuse a matrix over pairs of samples, if a node is made from one."""
    work, found = [node], None
    while work:
        at = work.pop()
        one, two = build.shapes.get(at, (None, None))
        sides = () if one is None else zip(one.shape, two.shape, strict=True)
        if sum(follows(v, w) is True for v, w in sides) > 1:
            found, work = at, []
        if at is node or at.target in _RESHAPES:
            work += at.all_input_nodes
    if found is not None:
        raise SpecError(
            f"{source_line_of(found)}: {found.name!r} compares each sample with the "
            "others, and these may be on other ranks: return what it is computed from, "
            "and compare in the loss"
        )


def is_heavy(node: fx.Node, root: fx.GraphModule) -> bool:
    """Return whether an operation starts a layer.

    It does if it multiplies by parameters or matrices.
    """
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        own = next(module.parameters(), None) is not None
        return own and not isinstance(module, NORMS)
    return node.target in _HEAVY
