"""Refuse a forward whose result depends on the calls that came before.

# Note [Calls that came before]
Forward may keep plain values, such as a scale for each shape that it has met. A capture
repeats the operations of a first call of each kind, so such a value must be the one
that a first call computes: a number that counts shapes, or the order in which they
came, would be frozen. If forward changes plain state in a call of a new kind, calls are
recorded in several orders: of other numbers of samples, in the other mode, without
gradients, in autocast. Each must do what it does as a first call, and a number or
tensor that it keeps must be one that a first call keeps. So a cache of what depends
only on the kind of a call is accepted, and a counter is not, although no operation
shows it yet.

This state is restored afterwards. What can't be restored, such as an iterator, must not
change.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from stretto.burst.tracing.aligning import aligned
from stretto.burst.tracing.caches import kept_in, tensors_in, undo
from stretto.burst.tracing.comparing import BATCHES, compare
from stretto.burst.tracing.fakes import Fakes
from stretto.burst.tracing.freezing import ContentFreezer
from stretto.burst.tracing.plain_state import PlainState, is_plain
from stretto.burst.tracing.recordings import record_once, untouched
from stretto.burst.tracing.records import Ref
from stretto.burst.tracing.source_lines import line_of_forward, line_where
from stretto.burst.tracing.without_constants import without_constants
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import nn

    from stretto.burst.tracing.caches import HolderList
    from stretto.burst.tracing.packing import Arguments
    from stretto.burst.tracing.reads import Reads
    from stretto.burst.tracing.records import Recording

_OTHER_SIZES = (13, 64, 5, 96)
"""Further numbers of samples, for decisions by how many there were."""

_MISSING = object()


@final
class _Kind(NamedTuple):
    """A kind of call."""

    text: str

    batch: int

    around: Callable[[], contextlib.AbstractContextManager[Any]]

    is_mode: bool = False
    """Whether it is in another mode."""


@final
class _Table(NamedTuple):
    """Where a call keeps a tensor."""

    holder: int
    """The id of what holds it."""

    key: Any

    number: int
    """Its number among the tensors under this key."""

    name: str


@contextlib.contextmanager
def _other_mode(module: nn.Module) -> Iterator[None]:
    was = [(part, part.training) for part in module.modules()]
    is_training = module.training
    try:
        for part, _ in was:
            part.training = not is_training
        yield
    finally:
        for part, flag in was:
            part.training = flag


def _kinds(
    module: nn.Module, device: str, names: Collection[str] | None
) -> list[_Kind]:
    """Return the kinds of calls that forward can tell apart by names in its code."""
    found = [_Kind(f"for {b} samples", b, contextlib.nullcontext) for b in BATCHES]

    def add(text: str, around: Any, *asked: str) -> None:
        if names is None or any(key in name for name in names for key in asked):
            found.append(_Kind(text, BATCHES[0], around, is_mode=True))

    mode = "eval" if module.training else "train"
    add(f"in {mode} mode", partial(_other_mode, module), "training")
    grad = torch.is_grad_enabled()
    add(
        "without gradients" if grad else "with gradients",
        partial(torch.set_grad_enabled, not grad),
        "grad",
        "inference",
    )
    cast = torch.is_autocast_enabled(device)
    add(
        "without autocast" if cast else "in autocast",
        partial(torch.autocast, device, dtype=torch.bfloat16, enabled=not cast),
        "autocast",
        "dtype",
    )
    return found


def require_none(
    module: nn.Module,
    run: Any,
    shape: tuple[int, ...],
    arguments: Arguments,
    reads: Reads,
) -> None:
    """Require that each kind of call does the same whatever came before.

    Raises:
        SpecError: it does not; the message names the line that changes state.
    """
    fakes = Fakes(module)
    with untouched(module, fakes, reads.names_in_code) as (holders, state):
        orders = _Orders(module, run, shape, arguments, fakes, (holders, state))
        orders.require(reads)


@final
class _Orders:
    """Records calls in several orders."""

    def __init__(
        self,
        module: nn.Module,
        run: Any,
        shape: tuple[int, ...],
        arguments: Arguments,
        fakes: Fakes,
        kept: tuple[HolderList, PlainState],
    ) -> None:
        self._module, self._run, self._shape = module, run, shape
        self._arguments, self._fakes = arguments, fakes
        self._holders, self._state = kept
        self._context = contextvars.copy_context()
        self._kept: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        """Kept tensors that forward's own operations made, in any call."""

    def require(self, reads: Reads) -> None:
        kinds = _kinds(self._module, self._arguments.device.type, reads.names_in_code())
        usual, other, *rest = kinds
        alone: dict[_Kind, tuple[Recording, dict[Any, Any]]] = {}
        for kind in kinds:
            self._forget()
            # It may not run in another mode.
            with contextlib.suppress(*(() if kind in (usual, other) else (SpecError,))):
                alone[kind] = self._call(kind), self._values() | self._tensors()
        self._forget()
        watch = reads.watch(is_between=False)
        for kind in rest:
            if kind in alone:
                self._require_order((usual, kind), alone)
                self._require_order((kind, usual), alone)
        self._require_order((other, usual), alone)
        self._require_order((usual, other), alone)
        self._require_any_number(alone[usual][0], usual, other)
        self._forget()
        if (name := watch.changed()) is not None:
            raise self._error((usual, other), name)

    def _require_order(
        self,
        order: tuple[_Kind, _Kind],
        alone: dict[_Kind, tuple[Recording, dict[Any, Any]]],
    ) -> None:
        """Compare a call after another kind of call with one without."""
        self._forget()
        self._call(order[0])
        after = self._call(order[1])
        self._compare(after, alone[order[1]][0], order)
        self._require_first_values(order, alone)

    def _require_any_number(
        self, first: Recording, usual: _Kind, before: _Kind
    ) -> None:
        """Compare calls of further numbers of samples after each other."""
        for size in _OTHER_SIZES:
            kind = usual._replace(text=f"for {size} samples", batch=size)
            after = None
            try:
                after = self._call(kind)
                batches = BATCHES[0], size
                compare(*aligned(first, after, batches), batches)
            except SpecError:
                self._forget()
                try:
                    alone = self._call(kind)
                except SpecError:
                    return  # it depends on the number of samples: see `Counts`
                if after is None:
                    raise self._error((before, kind)) from None
                self._compare(after, alone, (before, kind))
                return
            before = kind

    def _call(self, kind: _Kind) -> Recording:
        with kind.around():
            found = record_once(
                self._module,
                self._run,
                (kind.batch, *self._shape),
                self._arguments,
                self._fakes,
                None,
                kept=list(self._kept.values()),
                context=self._context,
            )
        for one in kept_in(self._holders):
            self._kept[id(one.tensor)] = one.tensor
            if isinstance(found.refs.get(id(one.tensor)), Ref):
                self._made[id(one.tensor)] = one.tensor
        for value in self._context.values():
            self._kept |= {id(tensor): tensor for tensor in tensors_in(value, Tensor)}
        return found

    def _forget(self) -> None:
        """Return to the state before the first call."""
        undo(self._holders)
        self._state.restore()
        self._kept = {}
        self._context = contextvars.copy_context()

    def _values(self) -> dict[Any, Any]:
        found: dict[Any, Any] = dict(self._state.values())
        found |= {
            variable: value
            for variable, value in self._context.items()
            if is_plain(value) and variable.get(_MISSING) != value
        }
        return found

    def _tensors(self) -> dict[_Table, Any]:
        """Return the values of the tensors that calls keep.

        Modules with hooks run as they are, and keep their own.
        """
        found: dict[_Table, Any] = {}
        numbers: Counter[tuple[int, Any]] = Counter()
        for one in kept_in(self._holders):
            value = self._fakes.mode.values.value_of(one.tensor, decides=False)
            if value is None or id(one.tensor) not in self._made:
                continue
            content = ContentFreezer()(value)
            key = content if isinstance(one.holder.of, set) else one.key
            entry = id(one.holder.of), key
            found[_Table(*entry, numbers[entry], one.holder.name_of(one.key))] = content
            numbers[entry] += 1
        return found

    def _compare(
        self, after: Recording, alone: Recording, order: tuple[_Kind, _Kind]
    ) -> None:
        values = self._fakes.mode.values
        kept = self._kept.values()  # made by the earlier call and used again
        is_known = all(map(values.has_value, kept))
        if self._kept and is_known:
            alone, after = (without_constants(one, values) for one in (alone, after))
        try:
            compare(*aligned(alone, after, None), None)
        except SpecError as exc:
            # In another mode a cache may hold other values: see `FirstValues`.
            if self._kept and (not is_known or any(kind.is_mode for kind in order)):
                return
            raise self._error(order) from exc

    def _require_first_values(
        self,
        order: tuple[_Kind, _Kind],
        alone: dict[_Kind, tuple[Recording, dict[Any, Any]]],
    ) -> None:
        """Require that each kept value is one that a first call keeps."""
        known = [alone[kind][1] for kind in order]
        for place, value in (self._values() | self._tensors()).items():
            if all(some.get(place, _MISSING) != value for some in known):
                raise self._error(order, self._name_of(place))

    def _error(self, order: tuple[_Kind, _Kind], name: str = "") -> SpecError:
        first, second = order
        kind = type(self._module).__name__
        line, found = self._line_changing(second, after=first)
        if not found:  # it depends on what the earlier call keeps
            line, found = self._line_changing(first)
        name = name or found
        what = f"changes {name!r}" if name else "changes what it keeps"
        return SpecError(
            f"{line}: forward of {kind} {what} in some calls, so that a call "
            f"{second.text} after one {first.text} is not like a first one. Layers "
            "repeat the operations of one call and not this code, so this would stay "
            "as it was at capture: compute it from the sizes and modes of the call "
            "alone, or change it in the training loop, between steps"
        )

    def _line_changing(
        self, kind: _Kind, after: _Kind | None = None
    ) -> tuple[str, str]:
        """Return the line of a call that changes state, and the name of that.

        The name is empty if no line does.
        """

        def call(kind: _Kind) -> None:
            with contextlib.suppress(SpecError):
                self._call(kind)

        def begin() -> None:
            self._forget()
            if after is not None:
                call(after)

        whole = self._state
        begin()
        call(kind)
        some = whole.of_changed()
        begin()
        self._state = some  # it is compared at each line
        try:
            return self._line_where(partial(call, kind))
        finally:
            self._state = whole

    def _line_where(self, call: Callable[[], None]) -> tuple[str, str]:
        before = self._values(), self._changed_names()
        changed: list[str] = []

        def is_changed() -> bool:
            now = self._values(), self._changed_names()
            if now == before:
                return False
            changed.extend(
                self._name_of(place)
                for place in {**now[0], **before[0]}
                if before[0].get(place, _MISSING) != now[0].get(place, _MISSING)
            )
            changed.extend(sorted(now[1] - before[1]) or sorted(now[1]))
            return True

        name = type(self._module).__name__
        line = line_where(call, is_changed, name)
        if not changed:
            line = line_of_forward(self._module).removesuffix(": ") or name
        return line, (changed or [""])[0]

    def _changed_names(self) -> Counter[str]:
        return Counter(h.name_of(key) for h, key, _ in self._state.changed())

    def _name_of(self, place: Any) -> str:
        """Return the name of a place in `_values`."""
        if isinstance(place, (contextvars.ContextVar, _Table)):
            return place.name
        return self._state.name_of(place)
