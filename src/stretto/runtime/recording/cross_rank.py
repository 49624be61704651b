"""Gather all ranks' records of a step and merge them on one clock.

# Note [Clocks of several hosts]
`time.perf_counter` counts from the start of a host, so two hosts' values are unrelated.
A rank asks the reference rank for its time and gets an answer. The reference's clock
was read between the question and the answer, which bounds the offset from both sides.
The tightest bounds of many questions are kept.

# Note [Why the store, and a thread]
A collective on the training's process group would make every rank wait for the slowest
one, and would hang if a rank died. Instead, a separate thread queries the store over a
connection of its own (a wait blocks a connection, and training may need its one), so
training continues. All waits are bounded: a rank that is late is left out and named.
The thread ends by itself, and a process with nothing else left to do waits for it.

# Note [Merged records]
A single rank's record shows only how long its collectives took. Together with the
others' records it shows which part of that was a wait for a rank that was not ready.
"""

from __future__ import annotations

import itertools
import socket
import threading
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, final

import msgspec

from stretto.logs import get_logger
from stretto.runtime.recording.step import (
    StepMarks,
    compute_spans,
    slice_words,
    slices_sent,
)
from stretto.runtime.store import own_connection
from stretto.schema import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.ranks import Ranks
    from stretto.runtime.recording.step import BucketRow

DRIFT_RATIO = 200e-6
"""Maximum drift between two hosts' clocks, per second.

Crystals are within 50 in a million, and correction over the network (NTP) slews by
about 100 more in quiet operation.
"""

_GOOD_BOUND_S = 100e-6
_MOST_ASKINGS = 64
_MOST_S = 2.0
_ANSWER_S = 1.0
_POLL_S = 0.005
_END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One request for the reference's time, all in seconds."""

    asked_s: float
    """Send time on the asking rank's clock."""

    reference_s: float
    """Time on the reference's clock, between the other two."""

    answered_s: float
    """Receive time on the asking rank's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPoint:
    """Offset of the reference's clock from a rank's at one time."""

    at_s: float
    """Time on the rank's clock."""

    offset_s: float
    """Reference minus rank."""

    bound_s: float
    """The offset is known within plus or minus this."""


def point_of(askings: Sequence[Asking]) -> ClockPoint:
    """Return the offset that is consistent with all requests.

    Each request shows that the offset is at least ``reference - answered`` and at most
    ``reference - asked``. Without drift all of these hold, so the offset is in the
    intersection; its middle is the estimate and half its width is the bound. (This is
    Cristian's method, Distributed Computing 3, 1989, with the intersection of Marzullo
    and Owicki, 1983.) If clocks have drifted so much that the intersection is empty,
    the fastest request alone is used.
    """
    low_s = max(a.reference_s - a.answered_s for a in askings)
    high_s = min(a.reference_s - a.asked_s for a in askings)
    if low_s > high_s:
        quickest = min(askings, key=lambda a: a.answered_s - a.asked_s)
        low_s = quickest.reference_s - quickest.answered_s
        high_s = quickest.reference_s - quickest.asked_s
    return ClockPoint(
        at_s=askings[-1].answered_s,
        offset_s=(low_s + high_s) / 2,
        bound_s=(high_s - low_s) / 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMap:
    """Maps a rank's clock to the reference's, from the points of comparison.

    Between two points the offset is interpolated linearly, which follows a steady
    drift. Beyond them it is constant, and the bound grows with `DRIFT_RATIO`. Without
    points both clocks are the same.
    """

    points: tuple[ClockPoint, ...] = ()

    def offset_s(self, at_s: float) -> float:
        """Return the offset to add to the rank's time ``at_s`` for the reference's."""
        if not self.points:
            return 0.0
        for before, after in itertools.pairwise(self.points):
            if before.at_s <= at_s <= after.at_s and before.at_s < after.at_s:
                share = (at_s - before.at_s) / (after.at_s - before.at_s)
                return before.offset_s + share * (after.offset_s - before.offset_s)
        return self._nearest(at_s).offset_s

    def bound_s(self, at_s: float) -> float:
        """Return the error bound of `offset_s` at ``at_s``.

        Between two points it is the larger of their bounds, if the drift is steady.
        """
        if not self.points:
            return 0.0
        for before, after in itertools.pairwise(self.points):
            if before.at_s <= at_s <= after.at_s:
                return max(before.bound_s, after.bound_s)
        nearest = self._nearest(at_s)
        return nearest.bound_s + DRIFT_RATIO * abs(at_s - nearest.at_s)

    def _nearest(self, at_s: float) -> ClockPoint:
        return min(self.points, key=lambda point: abs(at_s - point.at_s))


def clock_name() -> str:
    """Return the name of this process's clock; equal names mean the same clock.

    On Linux all processes of a host share it, unless a time namespace shifts it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return str(uuid.uuid4())


def ask_reference(store: Store, place: str) -> ClockPoint | None:
    """Compare this rank's clock with the reference's, through the store.

    ``store`` is this thread's own connection. Return ``None`` if there was no answer in
    time.
    """
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    askings: list[Asking] = []
    began_s = perf_counter()
    try:
        while len(askings) < _MOST_ASKINGS and perf_counter() - began_s < _MOST_S:
            number = len(askings)
            asked_s = perf_counter()
            store.set(f"{place}/ask/{number}", "")
            answer = store.get(f"{place}/answer/{number}")
            answered_s = perf_counter()
            reference_s = float(answer)
            askings.append(
                Asking(asked_s=asked_s, reference_s=reference_s, answered_s=answered_s)
            )
            if number and point_of(askings).bound_s < _GOOD_BOUND_S:
                break
        store.set(f"{place}/ask/{len(askings)}", _END)
        for number in range(len(askings)):
            store.delete_key(f"{place}/answer/{number}")
    except RuntimeError:  # the reference, or its store, is lost or busy
        pass
    return point_of(askings) if askings else None


def answer_rank(store: Store, place: str) -> None:
    """Answer one rank's requests for the time until it sends the last.

    ``store`` is this thread's own connection.

    Raises:
        RuntimeError: the rank stopped asking, or the store is lost.
    """
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    for number in range(_MOST_ASKINGS + 1):
        question = store.get(f"{place}/ask/{number}")
        if question.decode() == _END:
            store.delete_key(f"{place}/ask/{number}")
            return
        store.set(f"{place}/answer/{number}", repr(perf_counter()))
        store.delete_key(f"{place}/ask/{number}")


def wait_for_keys(
    store: Store, keys: Sequence[str], *, deadline_s: float, poll_s: float = _POLL_S
) -> set[str]:
    """Return which of ``keys`` exist by ``deadline_s`` of `time.perf_counter`.

    Poll rather than wait in the store: a wait that times out makes the store's client
    write warnings.

    Raises:
        RuntimeError: the store is lost.
    """
    missing = set(keys)
    while True:
        missing = {key for key in missing if not store.check([key])}
        if not missing or perf_counter() >= deadline_s:
            return set(keys) - missing
        sleep(poll_s)
        poll_s = min(2 * poll_s, 0.2)


_log = get_logger(__name__)

GATHER_S = 15.0
"""How long rank 0 waits for the others' records, and they for its clock."""


@final
class RecordGathering:
    """One recording of all ranks: clocks are compared at both ends, then gathered.

    Every rank creates one at the same step, calls `begin` when it starts to record and
    `finish` when it has recorded; both return at once.

    Args:
        ranks: This rank's place in the model's process group.
        timeout_s: How long one rank waits for another, at each end.
        clock: Name of this process's clock; ranks with equal names are assumed to read
            the same one.
    """

    def __init__(
        self, ranks: Ranks, *, timeout_s: float = GATHER_S, clock: str | None = None
    ) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._clock = clock or clock_name()
        serial = ranks.store.add(f"recording-serial/{ranks.rank}", 1)
        self._prefix = f"recording/{serial}"
        self._points: list[ClockPoint] = []
        self._beginning: threading.Thread | None = None
        self._finishing: threading.Thread | None = None

    def begin(self) -> None:
        """Compare the clocks for the first time."""
        self._beginning = self._start(self._begin)

    def finish(
        self, steps: Callable[[], tuple[StepMarks, ...]], gathered: OnGathered
    ) -> None:
        """Compare the clocks again and send the records to rank 0.

        Args:
            steps: Returns this rank's steps; called in another thread, so that it may
                wait for the device.
            gathered: Called in that thread on rank 0 with the received records.
        """

        def work() -> None:
            self._finish(steps, gathered)

        self._finishing = self._start(work)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the work of `finish`; return whether it has ended."""
        thread = self._finishing
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    # Run in threads.

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        # Not a daemon: the process may end with its last step, and the files come
        # after.
        thread = threading.Thread(target=work, name="stretto-recording")
        thread.start()
        return thread

    def _begin(self) -> None:
        try:
            self._compare("begin")
        except RuntimeError as exc:
            _log.debug("clocks not compared at the beginning: %s", exc)

    def _finish(
        self, steps: Callable[[], tuple[StepMarks, ...]], gathered: OnGathered
    ) -> None:
        if self._beginning is not None:
            self._beginning.join()
        own = RankRecord(host=socket.gethostname(), steps=steps())
        records = {self._ranks.rank: own}
        if self._ranks.size > 1:
            try:
                self._compare("end")
                own = replace(own, clock=ClockMap(points=tuple(self._points)))
                records[self._ranks.rank] = own
                if self._ranks.rank:
                    self._send(own)
                else:
                    self._collect(records)
            except RuntimeError as exc:
                _log.warning(
                    "%s: the store does not answer, so one rank's record is missing "
                    "from the timeline: %s",
                    self._ranks.name(self._ranks.rank),
                    str(exc).splitlines()[0],
                )
        if self._ranks.rank == 0:
            missing = [r for r in range(self._ranks.size) if r not in records]
            gathered(records, missing)

    def _connection(self) -> Store:
        return own_connection(self._ranks, limit_s=self._timeout_s)

    def _compare(self, when: str) -> None:
        """Align this rank's clock with rank 0's; rank 0 answers all others."""
        if self._ranks.size == 1:
            return
        store = self._connection()
        deadline_s = perf_counter() + self._timeout_s
        place = f"{self._prefix}/{when}"
        if self._ranks.rank == 0:
            self._answer(store, place, deadline_s)
            return
        store.set(f"{place}/clock/{self._ranks.rank}", self._clock)
        turn = f"{place}/turn/{self._ranks.rank}"
        if not wait_for_keys(store, [turn], deadline_s=deadline_s + 1.0):
            return
        if store.get(turn) == b"same":
            self._points.append(
                ClockPoint(at_s=perf_counter(), offset_s=0.0, bound_s=0.0)
            )
            return
        point = ask_reference(store, f"{place}/{self._ranks.rank}")
        if point is not None:
            self._points.append(point)

    def _answer(self, store: Store, place: str, deadline_s: float) -> None:
        """Answer each rank in order of arrival."""
        keys = {f"{place}/clock/{r}": r for r in range(1, self._ranks.size)}
        while keys and perf_counter() < deadline_s:
            came = wait_for_keys(store, list(keys), deadline_s=perf_counter() + 0.05)
            for key in sorted(came, key=keys.__getitem__):
                rank = keys.pop(key)
                if store.get(key).decode() == self._clock:
                    store.set(f"{place}/turn/{rank}", "same")
                    continue
                store.set(f"{place}/turn/{rank}", "ask")
                asked = self._connection()
                try:
                    answer_rank(asked, f"{place}/{rank}")
                except RuntimeError as exc:  # it died: the others continue
                    _log.debug("rank %d stopped asking: %s", rank, exc)

    def _send(self, record: RankRecord) -> None:
        data = zlib.compress(msgspec.json.encode(record), 1)
        store: Any = self._connection()  # takes bytes, but its stub omits that
        store.set(f"{self._prefix}/record/{self._ranks.rank}", data)

    def _collect(self, records: dict[int, RankRecord]) -> None:
        store = self._connection()
        keys = {f"{self._prefix}/record/{r}": r for r in range(1, self._ranks.size)}
        deadline_s = perf_counter() + self._timeout_s
        for key in wait_for_keys(store, list(keys), deadline_s=deadline_s):
            data = zlib.decompress(store.get(key))
            records[keys[key]] = msgspec.json.decode(data, type=RankRecord)
            store.delete_key(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's record, and its clock's offset from the reference's."""

    host: str

    steps: tuple[StepMarks, ...]

    clock: ClockMap = field(default_factory=ClockMap)


if TYPE_CHECKING:
    OnGathered = Callable[[dict[int, RankRecord], list[int]], None]
    """Takes the records by rank, and the ranks without a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """When the last rank was ready, in one step."""

    computed: tuple[float, int]
    """(End of backward's computation on the slowest rank, that rank)."""

    launched: Mapping[int, tuple[float, int]]
    """By bucket: (time of the last rank's launch, that rank)."""


def merged_timeline(
    name: str,
    records: Mapping[int, RankRecord],
    buckets: Mapping[int, Sequence[BucketRow]],
) -> Timeline:
    """Return all ranks' steps on one clock, from the first forward's start.

    The clock is that of the lowest rank.

    Args:
        name: The timeline's name.
        records: By rank.
        buckets: The plan's buckets in each step, by the step's number.

    Only steps that every rank has are included. Every span has ``args["rank"]`` and
    ``args["step"]``; ``clock_error_s`` of a rank's ``forward`` is the error bound of
    its clock. In addition to a single rank's spans, the track ``compute`` has ``waits
    for rank N`` (kind ``peer``: another rank's backward was not computed yet), ``waits
    for communication`` (kind ``exposed``), and ``between steps`` (kind ``outside``:
    optimizer, input, everything else); lanes have ``bucket N waits for rank M`` (kind
    ``peer``).
    """
    common = set(buckets)
    for record in records.values():
        common &= {step.number for step in record.steps}
    if not common or not records:
        return Timeline(name=name, spans=())
    aligned = {
        rank: {
            step.number: step.shifted(record.clock.offset_s(step.forward_s[0]))
            for step in record.steps
            if step.number in common
        }
        for rank, record in records.items()
    }
    origin_s = min(step.forward_s[0] for s in aligned.values() for step in s.values())
    others = {n: _others({r: aligned[r][n] for r in aligned}) for n in common}
    spans: list[Span] = []
    for rank, steps in aligned.items():
        own = {step.number: step for step in records[rank].steps}
        ended_s: float | None = None
        for number in sorted(common):
            step = steps[number]
            tags = {"rank": rank, "step": number}
            error_s = records[rank].clock.bound_s(own[number].forward_s[0])
            made = [
                *_outside(ended_s, step, origin_s),
                *compute_spans(step, origin_s),
                *_exposed(rank, step, others[number], origin_s),
                *_lanes(rank, step, buckets[number], others[number], origin_s),
            ]
            ended_s = step.ended_s if number + 1 in common else None
            for span in made:
                more: dict[str, Any] = dict(tags)
                if span.args["kind"] == "forward":
                    more["clock_error_s"] = error_s
                spans.append(
                    Span(
                        track=span.track,
                        name=span.name,
                        start_s=span.start_s,
                        end_s=span.end_s,
                        args={**span.args, **more},
                    )
                )
    return Timeline(name=name, spans=tuple(spans))


def _others(steps: Mapping[int, StepMarks]) -> _Others:
    launched: dict[int, tuple[float, int]] = {}
    for rank, step in steps.items():
        for bucket, at_s in step.launched:
            launched[bucket] = max(launched.get(bucket, (at_s, rank)), (at_s, rank))
    return _Others(
        computed=max((step.computed_s, rank) for rank, step in steps.items()),
        launched=launched,
    )


def _outside(ended_s: float | None, step: StepMarks, origin_s: float) -> list[Span]:
    """Return the time since the previous step ended: optimizer and input."""
    if ended_s is None or step.forward_s[0] <= ended_s:
        return []
    return [
        _span(
            "compute",
            "between steps",
            (ended_s, step.forward_s[0]),
            origin_s,
            kind="outside",
        )
    ]


def _exposed(
    rank: int, step: StepMarks, others: _Others, origin_s: float
) -> list[Span]:
    """Return a rank's waits after its backward: for a rank, then for the network."""
    last_s, slowest = others.computed
    split_s = min(max(step.computed_s, last_s), step.ended_s)
    spans = []
    if slowest != rank and split_s > step.computed_s:
        spans.append(
            _span(
                "compute",
                f"waits for rank {slowest}",
                (step.computed_s, split_s),
                origin_s,
                kind="peer",
                waits_for=slowest,
            )
        )
    else:
        split_s = step.computed_s
    if step.ended_s > split_s:
        spans.append(
            _span(
                "compute",
                "waits for communication",
                (split_s, step.ended_s),
                origin_s,
                kind="exposed",
            )
        )
    return spans


def _lanes(
    rank: int,
    step: StepMarks,
    buckets: Sequence[BucketRow],
    others: _Others,
    origin_s: float,
) -> list[Span]:
    """Return slices on their lanes, from the records of all ranks.

    A slice moves when all ranks have launched it and its lane is free; it waited for
    the later of the two.
    """
    spans: list[Span] = []
    free_s: dict[int, float] = {}
    for part in slices_sent(step, buckets):
        track = f"lane{part.lane}"
        name, args = slice_words(part, buckets)
        start_s = part.launched_s
        freed_s = min(max(start_s, free_s.get(part.lane, start_s)), part.finished_s)
        met_s, last = others.launched[part.bucket]
        begin_s = min(max(freed_s, met_s), part.finished_s)
        free_s[part.lane] = part.finished_s
        if freed_s > start_s:
            at = (start_s, freed_s)
            spans.append(
                _span(track, f"wait {name}", at, origin_s, kind="wait", **args)
            )
        if begin_s > freed_s and last != rank:
            at = (freed_s, begin_s)
            words = f"{name} waits for rank {last}"
            spans.append(
                _span(track, words, at, origin_s, kind="peer", waits_for=last, **args)
            )
        else:
            begin_s = freed_s
        at = (begin_s, part.finished_s)
        spans.append(_span(track, name, at, origin_s, kind="send", **args))
    return spans


def _span(
    track: str, name: str, at_s: tuple[float, float], origin_s: float, **args: Any
) -> Span:
    start_s, end_s = at_s
    return Span(
        track=track,
        name=name,
        start_s=start_s - origin_s,
        end_s=max(start_s, end_s) - origin_s,
        args=args,
    )
