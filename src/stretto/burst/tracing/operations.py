"""A module's operations with their results, and which of them form a layer.

A traced operation returns one of two: a *fixed* value, the same for any input (a
parameter, a mask); or a tensor computed from the input. Samples can move from one set
of ranks to another only at the latter, and only at those with a row for each sample.

# Note [What follows the batch]
The module is recorded for two numbers of samples, and twice for one of them. A number
that differs in the ratio of the batches follows the batch. Anything else that differs
is a decision or a value that layers on other ranks would not repeat, and is rejected.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import hashlib
import json
import keyword
import logging
import operator
import random
import re
import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from stretto.burst.memory import in_memory
from stretto.burst.tracing.behind import behind_outputs
from stretto.burst.tracing.cached_values import CachedValues, Entry
from stretto.burst.tracing.caches import (
    Cache,
    Holder,
    Holders,
    Kept,
    caches_of,
    forget,
    kept_in,
    restored,
    undo,
    written_by_torch,
)
from stretto.burst.tracing.comparing import (
    BATCHES,
    Count,
    Counts,
    compare,
    follows,
    require_like,
)
from stretto.burst.tracing.fakes import Fakes
from stretto.burst.tracing.ordering import Order
from stretto.burst.tracing.overlap import shared_with
from stretto.burst.tracing.packing import Arguments, Results
from stretto.burst.tracing.reads import HOOKS, Ambient, Reads, Watch
from stretto.burst.tracing.recorder import (
    SOURCE,
    Fixed,
    Record,
    Recording,
    Ref,
    UnseenTensor,
    is_user,
    line_setting,
    note_inputs,
    record,
    require_rows,
    set_item,
    source_line_in,
)
from stretto.burst.tracing.sample_positions import sample_positions_in, source_line_of
from stretto.burst.tracing.tables import NormInputs
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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

_WAYS = {
    "TorchScript": (
        "Functions of torch.jit.script can't be recorded: remove the decorator"
    ),
    "BatchedTensorImpl": (
        "torch.vmap and torch.func can't be recorded: compute the copies by batched "
        "operations or in a loop"
    ),
    "Expected inputs of BF16 type": (
        "Grouped products, such as those of experts, can't be recorded: with "
        "transformers call model.set_experts_implementation('batched_mm') before"
    ),
    "aten.nonzero": (
        "Which rows are computed must not depend on values: compute all, and select "
        "with torch.where or a mask of zeros and ones. For experts of transformers "
        "call model.set_experts_implementation('batched_mm') before"
    ),
    "Inference tensors do not track": (
        "torch.inference_mode() in forward can't be recorded: use torch.no_grad()"
    ),
}
"""What to do, by a part of torch's message."""

_RESHAPES = {"reshape", "view", "flatten", "to", "float", "double", "contiguous"}

_DROPOUTS: dict[Any, Any] = {
    functional.dropout: nn.Dropout,
    torch.dropout: nn.Dropout,
    functional.dropout1d: nn.Dropout1d,
    functional.dropout2d: nn.Dropout2d,
    functional.dropout3d: nn.Dropout3d,
    functional.alpha_dropout: nn.AlphaDropout,
}


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
    """Those of ``ops`` that return one tensor with a row for each sample."""

    shapes: dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]
    """Shape of a sample, and type, of the source and of those in ``rows``."""

    module: nn.Module
    """The traced module."""

    arguments: Arguments

    results: Results

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

    positions: set[fx.Node] = field(default_factory=set)
    """Those of ``ops`` whose rows are samples' positions in the batch."""

    caches: list[Cache] = field(default_factory=list)
    """What its forward keeps constants in, as it was at capture."""

    cached: CachedValues | None = None
    """What it would keep there."""

    semantics: list[tuple[str, str]] = field(default_factory=list)
    """For each operation a text with its constants, which is equal on all ranks, and
    its place in the user's code."""

    def outdated(self) -> str | None:
        """Return a value that forward read and that changed since, or None."""
        changed = self.watch.changed()
        if changed is None or not self.caches or self.cached is None:
            return changed
        with restored(self.caches):
            other = self.watch.changed()
        if other is None and self.cached.hold():
            return None
        return other or changed


def trace(
    module: nn.Module, example_inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Traced:
    """Return the operations of a module on an input like the example.

    Raises:
        SpecError: an input or output has no row for each sample, or layers would not
            repeat what the module does; the message names the line of its code that
            prevents it.
    """
    _refuse_scripted(module)
    _refuse_reserved(module)
    _refuse_sparse(module)
    arguments = Arguments(tuple(example_inputs), dict(kwargs or {}), module.forward)
    if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001
        raise SpecError(
            f"{type(module).__name__} has backward hooks on the whole model, which "
            "layers on other ranks would not call: register them on its layers"
        )
    found: Any = [None]

    def run(packed: Tensor) -> Any:
        args, named = arguments.unpack(packed)
        note_inputs((args, named))
        output = module.forward(*args, **named)
        results = Results(output, type(module).__name__)
        tensor = results.packed(output, packed.shape[0])
        found[0] = results
        return tensor

    shape = tuple(_packed_shape(arguments))
    reads = Reads(module)
    norms = NormInputs()
    recorded = _recordings(module, run, shape, arguments, reads, norms)
    first, other, caches = recorded.first, recorded.other, recorded.caches
    again = partial(_recording, module, run, shape, arguments, caches)
    ways = [again, partial(again, emptied=True)] if caches else [again]
    counts = Counts(first, other, ways)
    given = compare(first, other, BATCHES)
    order = Order(first, given)
    build = _graph_of(module, first, other, given, order, norms.tables(module))
    _refuse_views(first, module, build)
    records = [first.records[number] for number in order.numbers]
    semantics = [(order.renamed(_line_of(r, module)), r.place) for r in records]
    held = {name: name for name in _held_tensors(first, module)} | order.constants
    trained = list(module.parameters())
    semantics += sorted(
        (f"{new} {_digest_of(build.held(old), trained)}", f"values of {old!r}")
        for old, new in held.items()
    )
    # Outputs' types follow autocast, and ranks must agree on the types they send.
    semantics.append((f"autocast {Ambient.now(arguments.device).autocast}", "autocast"))
    traced = _classify(
        module, build, semantics, arguments, found[0], reads.watch(), counts
    )
    traced.caches = caches
    nodes = {
        entry: [build.known(ref) for ref in refs]
        for entry, refs in recorded.entries.items()
    }
    traced.cached = CachedValues(traced.root, build.counts, caches, nodes)
    traced.positions = sample_positions_in(
        traced.root, traced.ops, build.shapes, build.counts
    )
    traced.rows -= traced.positions
    for node in traced.positions:
        node.meta.pop("samples", None)  # each rank counts from zero
    traced.results.behind = behind_outputs(
        traced.root, traced.results, build.shapes, module
    )
    return traced


def _refuse_scripted(module: nn.Module) -> None:
    """Reject modules of TorchScript, whose parts can't be watched or replaced."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            owner, _, key = name.rpartition(".")
            line = line_setting(module.get_submodule(owner), key) if key else ""
            what = f"module {name!r}" if name else "the model"
            raise SpecError(
                f"{line}{what} was made by torch.jit.script or torch.jit.trace, whose "
                "layers and parameters are not visible: use the module from "
                "which it was made"
            )


def _refuse_sparse(module: nn.Module) -> None:
    """Reject sparse parameters and buffers, which have no storage to be recorded."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout != torch.strided:
            owner, _, key = name.rpartition(".")
            raise SpecError(
                f"{line_setting(module.get_submodule(owner), key)}{name!r} is a sparse "
                "tensor, which can't be recorded: use a dense one, or index operations"
            )


_RESERVED = set(dir(fx.GraphModule({}, fx.Graph()))) - set(dir(nn.Module()))
"""Attributes of torch.fx's modules, which hold the captured operations."""


def _refuse_reserved(module: nn.Module) -> None:
    """Reject parts of the model whose names the captured module needs itself."""
    held = (module._modules, module._parameters, module._buffers)  # noqa: SLF001
    for name in (name for names in held for name in names):
        if name in _RESERVED:
            raise SpecError(
                f"{line_setting(module, name)}{type(module).__name__} has a part named "
                f"{name!r}, a name that torch.fx reserves: rename it, or put the model "
                "into another module (`self.model = model`)"
            )


def _line_of(one: Record, module: nn.Module) -> str:
    """Return an operation and its constants, the same text in every process."""
    target = one.target if isinstance(one.target, str) else _qualified(one.target)
    text = f"{target} {one.args} {one.kwargs} {one.context}"
    if one.kind == "call_module":
        called = module.get_submodule(target)
        modes = "".join("et"[part.training] for part in called.modules())
        text += f" {called} {modes}"
    return re.sub(r" at 0x[0-9a-f]+|(?<=cuda:)[0-9]+|index=[0-9]+", "", text)


def _names_read(recording: Recording) -> set[str]:
    """Return the names of the held tensors that operations read."""
    leaves = (
        leaf
        for one in recording.records
        for leaf in pytree.tree_leaves((one.args, one.kwargs))
    )
    return {leaf.name for leaf in leaves if isinstance(leaf, Fixed)}


def _held_tensors(recording: Recording, module: nn.Module) -> set[str]:
    """Return tensors that operations read in plain attributes of modules."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return _names_read(recording) - known - recording.constants.keys()


def _refuse_views(recording: Recording, module: nn.Module, build: _Build) -> None:
    """Reject views of parameters that were made outside of forward.

    Their gradients would bypass the parameter's layer.
    """
    for name in sorted(_names_read(recording)):
        held = build.held(name)
        if getattr(held, "requires_grad", False) and not isinstance(held, nn.Parameter):
            owner, _, key = name.rpartition(".")
            raise SpecError(
                f"{line_setting(module.get_submodule(owner), key)}{name!r} needs a "
                "gradient but is not a parameter: compute it in forward from the "
                "parameter, detach() it, or make it a torch.nn.Parameter"
            )


def _digest_of(value: Any, trained: list[nn.Parameter]) -> str:
    """Return a digest of a tensor's values, the same in every process.

    A part of a parameter has other values on ranks that do not run its layer.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    plain = value.detach().cpu()
    is_plain = not plain.is_quantized and plain.layout == torch.strided
    if not is_plain or shared_with(value, trained):
        return f"{plain.dtype} {tuple(plain.shape)}"
    data = in_memory(plain).reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = f"{plain.dtype} {tuple(plain.shape)}"
    return f"{kind} {hashlib.sha256(data).hexdigest()[:16]}"


def _qualified(target: Any) -> str:
    owner = getattr(target, "__self__", None)
    return f"{getattr(owner, '__name__', '')}.{getattr(target, '__name__', target)}"


def _packed_shape(arguments: Arguments) -> tuple[int, ...]:
    packing = arguments.packing
    if packing.is_one:
        return packing.parts[0].shape
    return (sum(part.length for part in packing.parts),)


@dataclass
class _Recorded:
    first: Recording

    other: Recording

    caches: list[Cache]

    entries: dict[Entry, list[Ref | Fixed | None]]
    """The names in the first recording of tensors that it kept."""


def _recordings(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    reads: Reads,
    norms: NormInputs,
) -> _Recorded:
    """Record a call with each batch, after comparing a second call with the first.

    The second call is of the other batch. If it differs in more than sizes, three calls
    determine whether it differs because of the batch or from call to call. If forward
    fills caches, each recording finds them as they were. The caches are returned too.
    """
    fakes = Fakes(module)
    hooks = _hooks_in(module)

    def once(batch: int, known: Recording | None = None, kept: Any = ()) -> Recording:
        batches = None if batch == BATCHES[0] else BATCHES
        check = known and partial(require_like, known, batches)
        with norms.noted(batch):
            found = _once(
                module, run, (batch, *shape), arguments, fakes, reads, check, kept
            )
        _refuse_new_hooks(module, hooks)
        return found

    with contextlib.suppress(SpecError), _untouched(module, fakes) as holders:
        first = once(BATCHES[0])
        if not _constants_kept(first, module, holders):
            watch = reads.watch(is_between=False)
            other = once(BATCHES[1], first)
            _constants_kept(other, module, holders)
            _refuse_counted(module, watch)
            compare(first, other, BATCHES)
            return _Recorded(first, other, [], {})
    with _untouched(module, fakes) as holders:
        first = once(BATCHES[0])
        kept = _constants_kept(first, module, holders)
        watch = reads.watch(is_between=False)
        if kept:  # the next call may read what this one left
            once(BATCHES[0], kept=[one.tensor for one in kept])
        else:
            compare(first, once(BATCHES[0], first), None)
        _refuse_counted(module, watch)
        caches = caches_of(kept)
        entries: dict[Entry, list[Ref | Fixed | None]] = {}
        for one in kept:
            ref = first.refs.get(id(one.tensor))
            entries.setdefault((id(one.holder.of), one.key), []).append(ref)
    with _untouched(module, fakes) as holders:
        other = once(BATCHES[1], first)
        caches += caches_of(_constants_kept(other, module, holders))
    return _Recorded(first, other, caches, entries)


@contextmanager
def _untouched(module: nn.Module, fakes: Fakes) -> Iterator[list[Holder]]:
    """Undo what a recording changes; yield what it may keep tensors in."""
    holders = list(Holders(module, fakes.of))
    with keep_attributes(module), given_momenta(module):
        try:
            yield holders
        except UnseenTensor:
            forget(fakes.mode)
            raise
        finally:
            undo(holders)


def _constants_kept(
    recording: Recording, module: nn.Module, holders: list[Holder]
) -> list[Kept]:
    """Return the constants that forward keeps in caches; reject other tensors."""
    varying = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):  # noqa: SLF001
            varying |= {f"{name}.{key}" if name else key for key in part._buffers}  # noqa: SLF001
    parts = {id(part.__dict__): part for part in module.modules()}
    kept = [
        one
        for one in kept_in(holders)
        if (part := parts.get(id(one.holder.of))) is None
        or one.key not in written_by_torch(part)
    ]
    for one in kept:
        if not (source := recording.not_constant(one.tensor, varying)):
            continue
        name = one.holder.name_of(one.key)
        part = parts.get(id(one.holder.of))
        place = line_setting(part, one.key) if part is not None else ""
        made = recording.source_line_of(one.tensor)
        raise SpecError(
            f"{place or (made and made + ': ')}forward of {type(module).__name__} "
            f"keeps a tensor in its attribute or variable {name!r}, computed from "
            f"{source}, which ranks that do not run this layer would not have: compute "
            "it in each call, or return it as another output of the model"
        )
    return kept


def _recording(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    caches: list[Cache],
    batch: int,
    *,
    emptied: bool = False,
) -> Recording:
    """Record a call with some number of samples, with caches as at capture."""
    fakes = Fakes(module)
    with restored(caches, emptied=emptied), _untouched(module, fakes) as holders:
        found = _once(module, run, (batch, *shape), arguments, fakes, None)
        _constants_kept(found, module, holders)
        return found


def _once(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    fakes: Fakes,
    reads: Reads | None,
    check: Any = None,
    kept: Any = (),
) -> Recording:
    dtype, device = arguments.packing.dtype, arguments.device
    distributions: Any = torch.distributions.Distribution
    before, checked = _generators(), distributions._validate_args  # noqa: SLF001
    try:
        # Their argument checks read values; a run on values disables them.
        distributions.set_default_validate_args(value=False)
        with _quiet():
            # A context variable that forward sets is a cache, too.
            found = contextvars.copy_context().run(
                record, module, run, (shape, dtype, device), fakes, reads, check, kept
            )
    except SpecError:
        raise
    except Exception as error:
        where = source_line_in(error, type(module).__name__)
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecError(
            f"{where}: the layers of {type(module).__name__} can't be found "
            f"without values of tensors ({type(error).__name__}: {text}). "
            f"{_way_around(error)}"
        ) from error
    finally:
        distributions.set_default_validate_args(value=checked)
    drew = not _same_state(_generators(), before)
    _set_generators(before)
    if drew:
        raise SpecError(
            f"{_where_drawn(module, run, shape, dtype, device)}: forward "
            "draws from Python's or NumPy's random numbers, so that calls and "
            "ranks would differ: draw with torch for each sample, or decide "
            "outside of the model"
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the error that is about to be raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _way_around(error: Exception) -> str:
    """Return what to do about an operation that can't be recorded."""
    text = str(error)
    for part, way in _WAYS.items():
        if part in text:
            return way
    if type(error).__module__.startswith(("torch._subclasses", "torch.fx")):
        return (
            "What runs must not depend on a tensor's value: rewrite this line with "
            "tensor operations, or move it out of the model"
        )
    return (
        "If the model runs on the example, this line needs a tensor's value or memory: "
        "rewrite it with tensor operations, or move it out of the model; if it does "
        "not, correct the example's sizes or types"
    )


def _generators() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's own random numbers."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - users' is watched


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


def _same_state(one: tuple[Any, Any], two: tuple[Any, Any]) -> bool:
    pairs = zip(tuple(one[1]), tuple(two[1]), strict=True)
    return one[0] == two[0] and all(np.array_equal(a, b) for a, b in pairs)


def _where_drawn(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Return the line that draws, found by a recording that watches each line."""
    before = _generators()
    found: list[str] = []

    def watch(frame: Any, _event: str, _arg: Any) -> Any:
        if not found and not _same_state(_generators(), before):
            found.append(last[0])
        file = frame.f_code.co_filename
        if is_user(file):
            last[0] = f"{file}:{frame.f_lineno}"
            return watch
        return None

    last = [type(module).__name__]
    was = sys.gettrace()
    sys.settrace(watch)
    try:
        record(module, run, (shape, dtype, device), Fakes(module))
    finally:
        sys.settrace(was)
        _set_generators(before)
    return found[0] if found else last[0]


@contextmanager
def keep_attributes(module: nn.Module) -> Iterator[None]:
    """Undo forward's changes to attributes of modules, and to containers in them."""
    kept = [(part, dict(part.__dict__)) for part in module.modules()]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, attributes in kept:
        for value in attributes.values():
            _keep_contents(value, contents)
    try:
        yield
    finally:
        for part, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        for container, content in contents.values():
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(content)
            else:
                container.update(content)


def _keep_contents(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Copy the contents of a container, and of the containers in it."""
    if not isinstance(value, (dict, list, set, deque)) or id(value) in contents:
        return
    contents[id(value)] = (value, copy.copy(value))
    for inner in list(value.values() if isinstance(value, dict) else value):
        _keep_contents(inner, contents)


def _refuse_counted(module: nn.Module, watch: Watch) -> None:
    """Reject values that forward reads and changes in every call."""
    if (changed := watch.changed()) is not None:
        raise SpecError(
            f"forward of {type(module).__name__} changes {changed!r} in each call and "
            "reads it, which layers on other ranks would not: change it outside of the "
            "model, between steps; draw random numbers with torch, for each sample"
        )


def _hooks_in(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the keys of all hooks, by the module that has them."""
    return {
        name: tuple(tuple(getattr(part, kind)) for kind in HOOKS)
        for name, part in module.named_modules()
    }


def _refuse_new_hooks(module: nn.Module, before: dict[str, tuple[Any, ...]]) -> None:
    """Reject a forward that registers hooks: layers run without that forward."""
    for name, keys in _hooks_in(module).items():
        if before.get(name, keys) != keys:
            raise SpecError(
                f"forward of {type(module).__name__} registers or removes hooks of its "
                f"submodule {name!r}, which layers on other ranks would not: call the "
                "model once before you profile it and before you build the burst "
                "model, so that they are in place"
            )


# The graph.


class _Build:
    """Makes a graph from records."""

    def __init__(
        self,
        module: nn.Module,
        recording: Recording,
        names: Mapping[str, str],
        tables: frozenset[str],
    ) -> None:
        self.graph = fx.Graph()
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
        if dropout is not None:
            for batch, recorded in zip(BATCHES, (one, two), strict=True):
                for tensor in recorded.tensors.values():
                    require_rows(tensor, batch, one.place)
            name = free_name(f"dropout_{self._number}", self._module)
            self._targets[name] = dropout
            node = self.graph.call_module(name, (self._value(args[0]),))
        else:
            target = one.target
            if one.kind == "call_module":
                self._targets[target] = self._module.get_submodule(target)
                target = Name(target)
            elif one.kind == "call_function" and not _is_importable(target):
                target = _forwarding(target)
            if one.target not in _FROM_DATA:
                args, kwargs = pytree.tree_map(_plain_number, (args, kwargs))
            node = self.graph.create_node(
                one.kind, target, self._value(args), self._value(kwargs)
            )
        node.meta |= {
            "place": one.place,
            "context": one.context,
            "draws": one.draws and dropout is None,
            "writes": None if dropout is not None else one.writes,
            "aliases": one.aliases,
            "norms": tuple(n for n in one.norms if n not in self._tables),
            "keeps_state": one.keeps_state or self._updates_table(one),
            "borrowed": one.borrowed,
            "scans": next((s[1] for s in one.scanned if s not in two.scanned), ""),
        }
        self._number += 1
        self._nodes[Ref(number)] = node
        for path, tensor in one.tensors.items():
            made = self.node(Ref(number, path))
            self.shapes[made] = (tensor, two.tensors[path])

    def _updates_table(self, one: Record) -> bool:
        """Return whether it updates statistics of what is the same for all samples."""
        norms = [self.held(name) for name in one.norms if name in self._tables]
        return any(norm.training and norm.track_running_stats for norm in norms)

    def _dropout(self, one: Record, args: Any, kwargs: Any) -> nn.Module | None:
        """Return a dropout function as a module, so that masks follow samples."""
        kind = _DROPOUTS.get(one.target)
        if kind is None or one.kind != "call_function":
            return None
        names = ("input", "p", "train" if one.target is torch.dropout else "training")
        default = {"p": 0.5, "training": True}
        given = default | dict(zip(names, args, strict=False)) | kwargs
        if not given.get("train", given["training"]) or not given["p"]:
            return None
        made: nn.Module = kind(given["p"])
        return made.train()

    def _value(self, value: Any) -> Any:
        if isinstance(value, (Ref, Fixed)):
            return self.node(value)
        if isinstance(value, Count):
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


class Name(str):
    """The path of a held module or tensor, any part of which code can be made for.

    torch.fx writes parts after a dot unless they are no identifiers, and others between
    quotes as they are. Neither works for ``global`` or for a name with a quote.
    """

    __slots__ = ()

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        """Split it into parts."""
        return [_Part(part) for part in str(self).split(sep, maxsplit)]


class _Part(str):
    __slots__ = ()

    def isidentifier(self) -> bool:
        return super().isidentifier() and not keyword.iskeyword(self)

    def __format__(self, spec: str) -> str:
        return format(json.dumps(str(self), ensure_ascii=False)[1:-1], spec)


def free_name(name: str, *modules: nn.Module) -> str:
    """Return a name like this one that no module has for something else."""
    while any(hasattr(module, name) for module in modules):
        name += "_"
    return name


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

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions whose result has the type of a NumPy number that they are given."""

_PLAIN = (
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    type(...),
)


def _graph_of(
    module: nn.Module,
    first: Recording,
    other: Recording,
    given: list[tuple[Any, Any]],
    order: Order,
    tables: frozenset[str],
) -> _Build:
    build = _Build(module, first, order.constants, tables)
    for number in order.numbers:
        one, two = first.records[number], other.records[number]
        build.add(number, one, two, *given[number])
    if not isinstance(first.output, (Ref, Fixed)):
        raise SpecError(f"{type(module).__name__} gives no tensor")
    build.graph.output(build.node(first.output))
    for node in reversed(list(build.graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users:
            _require_no_state(node, build)
            build.graph.erase_node(node)
    return build


def _require_no_state(node: fx.Node, build: _Build) -> None:
    """Reject an operation without users that would update statistics or buffers."""
    changes = bool(node.meta.get("keeps_state"))
    for name in node.meta.get("norms", ()):
        norm = build.held(name)
        changes |= bool(norm.training and norm.track_running_stats)
    if changes:
        raise SpecError(
            f"{node.meta['place']}: the output of {node.target} is not used, but it "
            "updates the module's buffers in each call. Layers that no output depends "
            "on are not run: leave out the call, or use its output"
        )


def _classify(
    module: nn.Module,
    build: _Build,
    semantics: list[tuple[str, str]],
    arguments: Arguments,
    results: Results,
    watch: Watch,
    counts_known: Counts,
) -> Traced:
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
            source: (_packed_shape(arguments), arguments.packing.dtype),
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
    for node in build.graph.nodes:
        if node in (source, end) or node in build.counts:
            continue
        read = [n for n in node.all_input_nodes if n in ops]
        if not read:
            _require_same_for_all(node, build)
            continue
        if _is_constant(node, build, ops):
            continue
        _require_all_rows_written(traced, node)
        if node.meta.get("scans"):
            raise SpecError(
                f"{node.meta['scans']}: sums or compares along a dimension with the "
                "samples, so that each sample depends on those before it, and these "
                "may be on other ranks. Do it within each sample"
            )
        ops.add(node)
        traced.ops.append(node)
        traced.before[node] = [n for n in read if n is not source]
        if node in build.shapes:
            _row(traced, node, build)
    if result not in traced.rows - {source}:
        raise SpecError(
            f"{source_line_of(result)}: {type(module).__name__} must give tensors with "
            "a row for each sample, computed from its input; wrap it in a module that "
            "does"
        )
    return traced


def _is_constant(node: fx.Node, build: _Build, ops: set[fx.Node]) -> bool:
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
    """Reject ``h[6:] = 0``: each rank would write other samples."""
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


def _require_same_for_all(node: fx.Node, build: _Build) -> None:
    """Require that a fixed operation draws nothing that all samples share."""
    if not node.meta.get("draws"):
        return
    one, two = build.shapes.get(node, (None, None))
    if one is None or one.dim() < 1 or one.shape[0] == two.shape[0]:
        raise SpecError(
            f"{source_line_of(node)}: draws random numbers that all samples share, "
            "which would differ on each rank: draw them for each sample, with a first "
            "dimension that is the batch"
        )


def _row(traced: Traced, node: fx.Node, build: _Build) -> None:
    """Record whether a tensor has a row for each sample."""
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
            "is no multiple: it treats some samples differently from others, and "
            "these may be on other ranks. Treat all samples the same"
        )
    side = sides.index(True)
    node.meta["samples"] = side, value.shape[side] // BATCHES[0]
    if value.shape[0] == BATCHES[0] and sides == [True, *(False for _ in sides[1:])]:
        traced.rows.add(node)
        traced.shapes[node] = (tuple(value.shape[1:]), value.dtype)


def _refuse_pairs(build: _Build, node: fx.Node) -> None:
    """Reject a matrix over pairs of samples, if a node is made from one."""
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


@contextmanager
def given_momenta(module: nn.Module) -> Iterator[None]:
    """Give batch norms with a cumulative average a number for their momentum.

    They would compute it from the number of batches, which a fake tensor does not have.
    """
    norms = [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)  # noqa: SLF001
        and part.momentum is None
    ]
    try:
        for norm in norms:
            norm.momentum = 0.5
        yield
    finally:
        for norm in norms:
            norm.momentum = None
