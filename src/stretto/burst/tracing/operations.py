"""Trace a module: record it, build a graph, and classify the graph's operations.

# Note [What follows the batch]
The module is recorded for two numbers of samples, and twice for one of them. A number
that differs in the ratio of the batches follows the batch. Anything else that differs
is a decision or a value that layers on other ranks would not repeat, and is refused.
"""

from __future__ import annotations

import hashlib
import operator
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from stretto.burst.memory import bytes_of
from stretto.burst.tracing import call_history
from stretto.burst.tracing.build import Build, graph_of
from stretto.burst.tracing.cached_values import CachedValues
from stretto.burst.tracing.caches import keep_attributes
from stretto.burst.tracing.classify import Traced, classify, packed_shape
from stretto.burst.tracing.comparing import BATCHES, Counts, compare
from stretto.burst.tracing.ordering import Order
from stretto.burst.tracing.output_memory import views_among
from stretto.burst.tracing.output_parameters import parameters_of_outputs
from stretto.burst.tracing.overlap import shared_with
from stretto.burst.tracing.packing import Arguments, PackedResults
from stretto.burst.tracing.patching import note_inputs
from stretto.burst.tracing.reads import Ambient, Reads
from stretto.burst.tracing.recorder import is_leaf, leaves_of
from stretto.burst.tracing.recordings import Recorded, record_again, record_both
from stretto.burst.tracing.records import Fixed, Record, Recording
from stretto.burst.tracing.rerun import Rerun
from stretto.burst.tracing.sample_positions import sample_positions_in
from stretto.burst.tracing.source_lines import (
    line_of_forward,
    line_setting,
    line_where,
)
from stretto.burst.tracing.tables import NormInputs
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
    _refuse_compiled(module)
    _refuse_reserved(module)
    _refuse_sparse(module)
    _refuse_lazy(module)
    arguments = Arguments(tuple(example_inputs), dict(kwargs or {}), module.forward)
    if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001
        raise SpecError(
            f"{type(module).__name__} has backward hooks on the whole model, which "
            "layers on other ranks would not call: register them on its layers"
        )
    found: dict[int, PackedResults] = {}

    def run(packed: Tensor) -> Any:
        output, given = _call(module, arguments, packed)
        place = line_of_forward(module) + type(module).__name__
        results = PackedResults(output, place, given)
        tensor = results.packed(output, packed.shape[0])
        found[packed.shape[0]] = results
        return tensor

    shape = tuple(packed_shape(arguments))
    reads = Reads(module)
    norms = NormInputs()
    recorded = record_both(module, run, shape, arguments, reads, norms)
    reads.refuse_seed()
    first, other, caches = recorded.first, recorded.other, recorded.caches
    again = partial(record_again, module, run, shape, arguments, caches)
    ways = [again, partial(again, emptied=True)] if caches else [again]
    counts = Counts(first, other, ways)
    results = found[BATCHES[1]]
    _refuse_counts(module, found[BATCHES[0]], results)
    if recorded.changes_state:
        call_history.require_none(module, run, shape, arguments, reads)
    given = compare(first, other, BATCHES)
    order = Order(first, given)
    build = graph_of(module, first, other, given, order, norms.tables(module))
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
    traced = classify(
        module,
        build,
        semantics,
        arguments,
        results,
        reads.watch(trained=first.asks_for_gradients),
        counts,
    )
    traced.without_gradient = first.without_gradient
    traced.reads_layout = first.reads_layout
    traced.reads_offset = first.reads_offset
    traced.names = reads.names()
    traced.decided = frozenset(reads.decided)
    traced.leaves = leaves_of(module)
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
    traced.results.output_parameters = parameters_of_outputs(
        traced.root, traced.results, build.shapes, module
    )
    views = views_among(results.tensors, results.inputs)
    if isinstance(views, int):
        place = other.source_line_of(results.tensors[views])
        line = f"{place}: " if place else line_of_forward(module)
        raise SpecError(
            f"{line}an output of {type(module).__name__} overlaps in "
            "memory with another one: a program that writes into one in place would "
            "not change the other, as layers pass copies. Return a copy (clone()) of "
            "one of them"
        )
    results.share_memory(views)
    traced.rerun = _rerun(module, run, found, recorded, traced)
    if traced.rerun is not None and traced.rerun.is_all_code() and not traced.caches:
        traced.watch_of_layers = reads.watch_of_layers(trained=first.asks_for_gradients)
    return traced


def _rerun(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    found: Mapping[int, PackedResults],
    recorded: Recorded,
    traced: Traced,
) -> Rerun | None:
    """Return what runs forward again, if forward does the same then."""

    def again(packed: Tensor) -> tuple[Tensor, Any]:
        return run(packed), found[BATCHES[0]].description()

    first = recorded.first
    assert first.source is not None  # noqa: S101
    expected = first.returned, found[BATCHES[0]].description()
    for has_rare_calls in (False, True):
        rerun = Rerun(
            again,
            first.source,
            expected,
            first.calls,
            own=[
                part
                for part in module.modules()
                if not type(part).__module__.startswith("torch.nn.modules.")
            ],
            leaves=[part for part in module.modules() if is_leaf(part, module)],
            caches=recorded.caches,
            changed=recorded.changed,
            kept=recorded.stays,
            ambient=traced.ambient,
            device=traced.arguments.device,
            has_rare_calls=has_rare_calls,
        )
        with keep_attributes(module):
            if all(rerun.difference(keeps=False) is None for _ in range(2)):
                return rerun
    return None


def _call(
    module: nn.Module, arguments: Arguments, packed: Tensor
) -> tuple[Any, list[Tensor]]:
    """Call forward; refuse one that changes the containers that it is given.

    Return its output, and the tensors that it was given.
    """
    args, named = arguments.unpack(packed)
    note_inputs((args, named))
    before = pytree.tree_flatten((args, named))
    output = module.forward(*args, **named)
    if _are_same(before, pytree.tree_flatten((args, named))):
        return output, arguments.tensors(args, named)
    args, named = arguments.unpack(packed)
    before = pytree.tree_flatten((args, named))
    place = line_where(
        lambda: module.forward(*args, **named),
        lambda: not _are_same(before, pytree.tree_flatten((args, named))),
        type(module).__name__,
    )
    raise SpecError(
        f"{place}: changes a list or dictionary that the model is called with. The "
        "program's own one would stay as it is: change a copy, and return what the "
        "program needs"
    )


def _are_same(one: tuple[list[Any], Any], two: tuple[list[Any], Any]) -> bool:
    """Return whether two flattened structures hold the same objects."""
    return one[1] == two[1] and all(map(operator.is_, one[0], two[0]))


def _refuse_counts(
    module: nn.Module, first: PackedResults, other: PackedResults
) -> None:
    """Refuse outputs that are not tensors and follow the number of samples."""
    for a, b in zip(first.others, other.others, strict=False):
        if a is not b and (type(a) is not type(b) or a != b):
            raise SpecError(
                f"{line_of_forward(module)}forward of {type(module).__name__} returns "
                f"{a!r} for {BATCHES[0]} samples and {b!r} for {BATCHES[1]}, which "
                "would be the same for any number: return tensors only, and take the "
                "number of samples from them"
            )


def _refuse_scripted(module: nn.Module) -> None:
    """Refuse modules of TorchScript, whose parts can't be watched or replaced."""
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


def _refuse_compiled(module: nn.Module) -> None:
    """Refuse modules of torch.compile, whose operations can't be recorded."""
    for name, part in module.named_modules():
        is_whole = type(part).__module__.startswith("torch._dynamo")
        if is_whole or (name and part._compiled_call_impl is not None):  # noqa: SLF001
            what = f"module {name!r}" if name else "the model"
            raise SpecError(
                f"{what} was compiled by torch.compile, and can't be recorded: build "
                "the burst model from the module as it was before, and compile the "
                "loss or other code outside of it"
            )


def _refuse_sparse(module: nn.Module) -> None:
    """Refuse sparse parameters and buffers, which have no storage to be recorded."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout != torch.strided:
            owner, _, key = name.rpartition(".")
            raise SpecError(
                f"{line_setting(module.get_submodule(owner), key)}{name!r} is a sparse "
                "tensor, which can't be recorded: use a dense one, or index operations"
            )


def _refuse_lazy(module: nn.Module) -> None:
    """Refuse parameters and buffers whose shapes are not known yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            owner, _, key = name.rpartition(".")
            part = module.get_submodule(owner)
            raise SpecError(
                f"{line_setting(part, key)}{name!r} of a lazy module has no shape yet: "
                "call the model once on an example before"
            )


_RESERVED = set(dir(fx.GraphModule({}, fx.Graph()))) - set(dir(nn.Module()))
"""Attributes of torch.fx's modules, which hold the captured operations."""


def _refuse_reserved(module: nn.Module) -> None:
    """Refuse parts of the model whose names the captured module needs itself."""
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


def _refuse_views(recording: Recording, module: nn.Module, build: Build) -> None:
    """Refuse views of parameters that were made outside of forward.

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
    kind = f"{plain.dtype} {tuple(plain.shape)}"
    return f"{kind} {hashlib.sha256(bytes_of(plain)).hexdigest()[:16]}"


def _qualified(target: Any) -> str:
    owner = getattr(target, "__self__", None)
    return f"{getattr(owner, '__name__', '')}.{getattr(target, '__name__', target)}"
