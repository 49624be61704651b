"""Record a module with both batches, and undo what its forward changes.

A second recording of the other batch is compared with the first while it is made.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stretto.burst.hooks import HOOKS
from stretto.burst.tracing.aligning import Alignment, aligned
from stretto.burst.tracing.cache_search import Holders
from stretto.burst.tracing.cached_values import Entry
from stretto.burst.tracing.caches import (
    Cache,
    Holder,
    HolderList,
    Kept,
    caches_of,
    forget,
    keep_attributes,
    kept_in,
    restored,
    undo,
    written_by_torch,
)
from stretto.burst.tracing.comparing import BATCHES, compare
from stretto.burst.tracing.copied_norms import is_copied
from stretto.burst.tracing.fakes import Fakes, without_log
from stretto.burst.tracing.freezing import Freezer
from stretto.burst.tracing.patching import arguments_unchecked
from stretto.burst.tracing.plain_state import PlainState
from stretto.burst.tracing.recorder import UnseenTensor, record
from stretto.burst.tracing.records import Fixed, Recording, Ref
from stretto.burst.tracing.settings import ModuleSettings
from stretto.burst.tracing.source_lines import (
    is_raised_by_user,
    line_of_forward,
    line_setting,
    line_where,
    source_line_in,
)
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.burst.tracing.packing import Arguments
    from stretto.burst.tracing.reads import Reads
    from stretto.burst.tracing.tables import NormInputs
    from stretto.burst.tracing.watching import Watch

_PLAIN = (int, float, complex, str, bytes, tuple, frozenset)
"""Types of values that count or decide; others in context variables are caches."""

_WAYS = {
    "Cannot access data pointer": (
        "Its memory is read outside of PyTorch's operations: rewrite this line with "
        "tensor operations, or write it as a torch.autograd.Function"
    ),
    "TorchScript": (
        "Functions of torch.jit.script can't be recorded: remove the decorator"
    ),
    "BatchedTensorImpl": (
        "torch.vmap and torch.func can't be recorded: compute the copies by batched "
        "operations or in a loop"
    ),
    "Expected inputs of BF16 type": (
        "Grouped products, such as those of experts, can't be recorded: compute every "
        "expert by a product of batches (torch.bmm)"
    ),
    "aten._pack_padded_sequence": (
        "Packed sequences can't be recorded, as their sizes are values of the lengths. "
        "Give the module the padded tensor with the batch first, and take what you "
        "need of its output by lengths in an input: the last step of each sequence by "
        "out.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, out.size(2))), or "
        "torch.where with a mask. The backward direction of a bidirectional one would "
        "begin at the padding: flip each sequence within its length by gather"
    ),
    "tensors used as indices must be": (
        "A mask of type uint8 can't be recorded as an index: select with torch.where "
        "and mask.bool(), or index by numbers that are computed outside of forward"
    ),
    "aten.nonzero": (
        "Which rows are computed must not depend on values: compute all, and select "
        "with torch.where or a mask of zeros and ones. A layer of experts computes "
        "each expert for all rows, times its weight for a row, which is 0 where it was "
        "not chosen; replace its forward if it is a library's"
    ),
    "Creating a new Tensor subclass": (
        "as_subclass() in forward can't be recorded: layers compute with plain "
        "tensors. Leave it out, and convert what the model returns outside of it; "
        "inputs may have such a class"
    ),
    "Expected hidden": (
        "States of a recurrent module have the samples in dimension 1, and inputs of "
        "the model have them first: pass and return states as (samples, layers, "
        "features), and give the module state.transpose(0, 1).contiguous()"
    ),
    "Expected more than 1 value per channel": (
        "A batch norm needs more than one value to train, here as in one process: give "
        "all ranks together more samples, for example by drop_last=True of DataLoader"
    ),
    "Inference tensors do not track": (
        "torch.inference_mode() in forward can't be recorded: use torch.no_grad()"
    ),
}
"""The way out, by a part of torch's message."""

_OF_TYPES = re.compile(
    "scalar type|(?<!')dtype|type .*should be the same|must have the type|index tensor"
    "|used as indices|not implemented for '"
)

_OF_SIZES = re.compile("size|shape|dim|broadcast")

OTHER_TYPE = "This line can't compute with tensors of that type"
"""The reason for PyTorch's errors about types; a capture adds the example's."""


@dataclass
class Recorded:
    """The recordings of a forward, and what it keeps outside of the call."""

    first: Recording

    other: Recording

    caches: list[Cache]

    entries: dict[Entry, list[Ref | Fixed | None]]
    """The names in the first recording of tensors that it kept."""

    changes_state: bool
    """Whether forward changes plain state, see `call_history`."""

    changed: list[Holder]
    """Holders of the state that forward changes."""

    stays: set[tuple[int, Any]]
    """The entries of these that do not depend on the number of samples, by the ids of
    holders and by keys."""


def record_both(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    reads: Reads,
    norms: NormInputs,
) -> Recorded:
    """Record a call with each batch, after comparing a second call with the first.

    The second call is of the other batch. If it differs in more than sizes, three calls
    determine whether it differs because of the batch or from call to call. If forward
    fills caches, each recording finds them as they were. The caches are returned too.
    """
    fakes = Fakes(module)
    reads.decided = fakes.mode.values.read
    hooks = _hooks_in(module)

    def once(batch: int, known: Recording | None = None, kept: Any = ()) -> Recording:
        batches = None if batch == BATCHES[0] else BATCHES
        check = known and Alignment(known.records, batches).add
        with norms.noted(batch):
            found = record_once(
                module, run, (batch, *shape), arguments, fakes, reads, check, kept
            )
        _refuse_new_hooks(module, hooks)
        return found

    changes_state = False
    found: Recorded | None = None
    names = reads.names_in_code
    with (
        contextlib.suppress(SpecError),
        untouched(module, fakes, names) as (holders, state),
    ):
        first = once(BATCHES[0])
        if not _constants_kept(first, module, holders):
            watch = reads.watch(is_between=False)
            changed, copies = _copied(state)
            changes_state = first.sets_variables or bool(changed)
            other = once(BATCHES[1], first)
            _constants_kept(other, module, holders)
            changes_state |= watch.changed() is not None
            _refuse_counted(module, watch, str)
            first, other = aligned(first, other, BATCHES)
            compare(first, other, BATCHES)
            found = Recorded(first, other, [], {}, changes_state, changed, set())
    if found is not None:
        if changed:
            with untouched(module, fakes, names) as (_, state):
                once(BATCHES[1])
                found.stays = _equal_in(copies, _copied(state)[1])
        return found
    with untouched(module, fakes, names) as (holders, state):
        first = once(BATCHES[0])
        kept = _constants_kept(first, module, holders)
        changed, copies = _copied(state)
        watch = reads.watch(is_between=False)
        if kept:  # the next call may read what this one left
            once(BATCHES[0], kept=[one.tensor for one in kept])
        else:
            compare(*aligned(first, once(BATCHES[0], first), None), None)
        _refuse_counted(
            module, watch, partial(_line_changing, module, run, shape, arguments, reads)
        )
        caches = caches_of(kept)
    with untouched(module, fakes, names) as (holders, state):
        other = once(BATCHES[1], first)
        caches += caches_of(_constants_kept(other, module, holders))
        stays = _equal_in(copies, _copied(state)[1])
    first, other = aligned(first, other, BATCHES)
    entries: dict[Entry, list[Ref | Fixed | None]] = {}
    for one in kept:
        ref = first.refs.get(id(one.tensor))
        entries.setdefault((id(one.holder.of), one.key), []).append(ref)
    changes_state = changes_state or bool(kept)
    return Recorded(first, other, caches, entries, changes_state, changed, stays)


def _copied(state: PlainState) -> tuple[list[Holder], dict[tuple[int, Any], Any]]:
    """Return what holds changed state, and copies of the changed entries."""
    freeze = Freezer(None, ())
    changed = state.changed()
    copies = {(id(h.of), key): freeze(value) for h, key, value in changed}
    return [holder for holder, _, _ in changed], copies


def _equal_in(one: dict[Any, Any], two: dict[Any, Any]) -> set[Any]:
    """Return the keys of equal values."""
    return {key for key in one.keys() & two.keys() if one[key] == two[key]}


@contextmanager
def untouched(
    module: nn.Module, fakes: Fakes, names: Callable[[], set[str] | None]
) -> Iterator[tuple[HolderList, PlainState]]:
    """Undo what a recording changes; yield what it may keep tensors in.

    ``names`` are those in forward's code, whose plain state is restored.
    """
    holders = Holders(module, fakes.of)
    state = PlainState(holders, names)
    with keep_attributes(module), given_momenta(module):
        try:
            yield holders, state
        except UnseenTensor:
            forget(fakes.mode)
            raise
        finally:
            undo(holders)
            state.restore()


def _constants_kept(
    recording: Recording, module: nn.Module, holders: HolderList
) -> list[Kept]:
    """Return the constants that forward keeps in caches; refuse other tensors."""
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
            f"{source}, which ranks that do not run this layer would not have: use a "
            "local variable, pass it to later code as an argument, or return it as "
            "another output of the model"
        )
    return kept


def record_again(
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
    with (
        restored(caches, emptied=emptied),
        untouched(module, fakes, set) as (holders, _),
    ):
        found = record_once(module, run, (batch, *shape), arguments, fakes, None)
        _constants_kept(found, module, holders)
        return found


def record_once(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    fakes: Fakes,
    reads: Reads | None,
    check: Any = None,
    kept: Any = (),
    context: contextvars.Context | None = None,
) -> Recording:
    """Record a call, and refuse what no layer may do.

    ``context`` keeps the context variables that it sets; None: nothing does.
    """
    dtype, device = arguments.packing.dtype, arguments.device
    before = _generators()
    settings = ModuleSettings(module)
    # A context variable that forward sets is a cache, too.
    is_one_of_many = context is not None
    context = context or contextvars.copy_context()

    def again() -> None:
        record(module, run, (shape, dtype, device), Fakes(module))

    try:
        with without_log(), arguments_unchecked():
            found = context.run(
                record, module, run, (shape, dtype, device), fakes, reads, check, kept
            )
            if not is_one_of_many:
                found.sets_variables = _require_set_once(
                    context, again, type(module).__name__
                )
    except SpecError:
        raise
    except Exception as error:
        where = source_line_in(error, type(module).__name__)
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if is_raised_by_user(error):
            raise SpecError(
                f"{where}: forward of {type(module).__name__} raises "
                f"{type(error).__name__}: {text}. It ran without values of tensors: if "
                "it would raise with values too, correct what it checks"
            ) from error
        raise SpecError(
            f"{where}: the layers of {type(module).__name__} can't be found "
            f"without values of tensors ({type(error).__name__}: {text}). "
            f"{_way_around(error, arguments)}"
        ) from error
    if (change := settings.change()) is not None:
        raise SpecError(f"{_line_setting(module, again, settings)}: {change}")
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


def _require_set_once(
    context: contextvars.Context, again: Callable[[], object], name: str
) -> bool:
    """Refuse a context variable that forward sets to another number in each call.

    Return whether it sets one to a number.
    """

    def values() -> dict[Any, Any]:
        return {v: x for v, x in context.items() if isinstance(x, _PLAIN)}

    once = {v: x for v, x in values().items() if v.get(context) is not x}
    if not once:
        return False
    context.run(again)
    twice = values()
    for variable, value in once.items():
        if variable not in twice or twice[variable] == value:
            continue

        def has_changed(variable: Any = variable, now: Any = twice[variable]) -> bool:
            return bool(variable.get() != now)

        where = line_where(partial(context.run, again), has_changed, name)
        raise SpecError(
            f"{where}: forward of {name} changes the context variable "
            f"{variable.name!r} in each call. Layers repeat the operations of one "
            "call and not this code, so it would no longer change: do it in the "
            "training loop, between steps"
        )
    return True


def is_of_types(error: BaseException | None) -> bool:
    """Return whether PyTorch's error says that a tensor has another type than it may.

    Its messages have no common form.
    """
    return isinstance(error, RuntimeError | IndexError | TypeError | ValueError) and (
        _OF_TYPES.search(str(error)) is not None
    )


def _way_around(error: Exception, arguments: Arguments) -> str:
    """Return what to do about an operation that can't be recorded."""
    text = str(error)
    if _is_in_experts(error):
        return (
            "For experts of transformers call "
            "model.set_experts_implementation('batched_mm') before"
        )
    for part, way in _WAYS.items():
        if part in text:
            return way
    if is_of_types(error):
        return OTHER_TYPE
    pair = arguments.pair_of_samples
    if pair is not None and _OF_SIZES.search(text):
        return (
            f"An input of shape {pair} has the example's number of samples in two "
            "dimensions. If it relates all samples to each other, as the edges of a "
            "graph do, they can't be on different ranks: let each sample be a whole "
            "graph, with inputs (graphs, nodes, features) and (graphs, nodes, nodes)"
        )
    if type(error).__module__.startswith(("torch._subclasses", "torch.fx")):
        return (
            "What runs must not depend on values that are computed from samples, "
            "trained parameters, statistics or random numbers: rewrite this line with "
            "tensor operations, or move it out of the model"
        )
    return (
        "If the model runs on the example, this line needs a tensor's value or memory: "
        "rewrite it with tensor operations, or move it out of the model; if it does "
        "not, correct the example's sizes or types"
    )


def _is_in_experts(error: Exception) -> bool:
    """Return whether transformers chose what the failing code of experts runs."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_globals.get("__name__") == "transformers.integrations.moe":
            return True
        at = at.tb_next
    return False


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
    try:
        return line_where(
            lambda: record(module, run, (shape, dtype, device), Fakes(module)),
            lambda: not _same_state(_generators(), before),
            type(module).__name__,
        )
    finally:
        _set_generators(before)


def _line_setting(
    module: nn.Module, again: Callable[[], object], settings: ModuleSettings
) -> str:
    """Return the line of forward that changes a module's settings."""

    def call() -> None:
        with contextlib.suppress(SpecError):
            again()

    settings.restore()
    try:
        return line_where(
            call, lambda: settings.change() is not None, type(module).__name__
        )
    finally:
        settings.restore()


def _line_changing(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    reads: Reads,
) -> str:
    """Return the line of forward that changes a value that it reads."""
    watch = reads.watch(is_between=False)
    known = (BATCHES[0], *shape), arguments.packing.dtype, arguments.device
    return line_where(
        lambda: record(module, run, known, Fakes(module)),
        lambda: watch.changed() is not None,
        type(module).__name__,
    )


def _refuse_counted(module: nn.Module, watch: Watch, line: Callable[[], str]) -> None:
    """Refuse values that forward reads and changes in every call."""
    if (changed := watch.changed()) is not None:
        raise SpecError(
            f"{line()}: forward of {type(module).__name__} changes {changed!r} in each "
            "call. Its code may run more than once for a step, with another number of "
            "samples and without values, so such a change is not what one process "
            "has: make it in the training loop, between steps. To log, register a "
            "forward hook on a module of torch.nn, such as an nn.Linear, after "
            "BurstParallel is built. Draw random numbers with torch"
        )


def _hooks_in(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the keys of all hooks, by the module that has them."""
    return {
        name: tuple(tuple(getattr(part, kind)) for kind in HOOKS)
        for name, part in module.named_modules()
    }


def _refuse_new_hooks(module: nn.Module, before: dict[str, tuple[Any, ...]]) -> None:
    """Refuse a forward that registers hooks: layers run without that forward."""
    for name, keys in _hooks_in(module).items():
        if before.get(name, keys) != keys:
            raise SpecError(
                f"{line_of_forward(module)}forward of {type(module).__name__} "
                "registers or removes hooks of its "
                f"submodule {name!r}, which layers on other ranks would not: call the "
                "model once before you profile it and before you build the burst "
                "model, so that they are in place"
            )


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
        and not is_copied(part)
    ]
    try:
        for norm in norms:
            norm.momentum = 0.5
        yield
    finally:
        for norm in norms:
            norm.momentum = None
