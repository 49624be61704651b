"""Time simultaneous all-reduces on a live process group, also beside computation.

Rank 0 makes every decision (which sizes, how many repetitions, when to stop) and
broadcasts it first, so all ranks issue the same collectives.
"""

from __future__ import annotations

import contextlib
import math
import platform
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stretto.boolean_options import bool_option
from stretto.errors import SpecError
from stretto.measure.load import convolutions
from stretto.measure.steady import quartile_distance
from stretto.schema import CollectiveSample, ContentionSample
from stretto.units import counted, format_bytes, format_s

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_SIZES_BYTES = tuple(2**e for e in range(10, 25, 2))
"""1 KiB to 16 MiB, each four times the one before."""

DEFAULT_LANES = (1, 2, 4, 8)

Progress = Callable[[float, str], None]
"""Called with the completed share, 0 to 1, and a line that says what runs."""

_PILOT_BYTES = 256 * 1024
_SHORT_PILOT_BYTES = 64 * 1024
_SHORT_BUDGET_S = 2.0  # below it the pilot is short, too
_SHORT_S = 0.01  # a repetition is filled up to this with back-to-back collectives
_MIN_S = 0.004  # the same in a short budget
_MAX_INNER = 32
_LOAD_S = 0.2  # length of the synthetic computation
_CONTENTION_BYTES = 1024 * 1024
_MARGIN = 1.25  # factor on estimates when they are compared with the budget
_MIN_REPETITIONS = 3
_SIZE_PRIORITY = (20, 16, 22, 18, 24, 14, 12, 10)  # log2, most important first
_LANE_PRIORITY = (1, 4, 2, 8)


@dataclass(frozen=True, kw_only=True)
class NetworkSamples:
    """The result of one probe; equal on all ranks."""

    collectives: tuple[CollectiveSample, ...]

    contention: tuple[ContentionSample, ...]

    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Point:
    size_bytes: int
    lanes: int
    durations_s: list[float] = field(default_factory=list)


def probe_network(
    *,
    group: ProcessGroup | None = None,
    agreement_group: ProcessGroup | None = None,
    lane_group: Callable[[int], ProcessGroup] | None = None,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    lanes: Sequence[int] = DEFAULT_LANES,
    points: Sequence[tuple[int, int]] | None = None,
    repetitions: int = 5,
    budget_s: float = 60.0,
    contention: bool = True,
    load: Callable[[], None] | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> NetworkSamples:
    """Time all-reduces over sizes and numbers of lanes. Call it on every rank.

    Sizes and lanes are interleaved, so that a slow moment of the network affects all of
    them equally. If the budget is short, the grid becomes coarser: sizes near 1 MiB are
    kept longest, then repetitions fall to 3. Nothing exceeds the budget by more than
    one collective's misjudged time.

    Args:
        group: The ranks to measure; all of them by default.
        agreement_group: Used by the probe itself to agree, from the CPU; ``group`` by
            default.
        lane_group: Returns lane ``i``'s process group, the same on every rank. By
            default new groups are made, and destroyed afterward.
        sizes_bytes: Messages.
        lanes: Numbers of simultaneous all-reduces.
        points: Pairs of size and number of lanes instead of all of them, most
            important first; at least two sizes on the smallest number of lanes.
        repetitions: Largest number per size and number of lanes.
        budget_s: The probe ends within this.
        contention: Whether computation beside communication is measured as well, in
            about a third of the budget.
        load: One piece of computation, a few milliseconds long, for that measurement;
            by default a small convolutional network's forward and backward.
        device: Device of the messages; by default as the group's backend needs.
        progress: Called on every rank as the probe proceeds.

    Raises:
        SpecError: there are fewer than 2 ranks, no size or lane, or too small a budget,
            or ``contention`` is not true or false.
    """
    contention = bool_option("contention", contention)
    probe = _Probe(
        group=group,
        agreement_group=agreement_group,
        lane_group=lane_group,
        sizes_bytes=sizes_bytes if points is None else [size for size, _ in points],
        lanes=lanes if points is None else [count for _, count in points],
        points=points,
        budget_s=budget_s,
        device=device,
        progress=progress or _silent,
    )
    try:
        share = 0.65 if contention else 1.0
        collectives = probe.collectives(repetitions, end_s=share * budget_s)
        beside: tuple[ContentionSample, ...] = ()
        if contention:
            beside = probe.contention(load or convolutions(probe.device))
        return NetworkSamples(
            collectives=collectives,
            contention=beside,
            provenance=probe.provenance(),
        )
    finally:
        probe.close()


class _Probe:
    def __init__(
        self,
        *,
        group: ProcessGroup | None,
        agreement_group: ProcessGroup | None,
        lane_group: Callable[[int], ProcessGroup] | None,
        sizes_bytes: Sequence[int],
        lanes: Sequence[int],
        points: Sequence[tuple[int, int]] | None,
        budget_s: float,
        device: torch.device | None,
        progress: Progress,
    ) -> None:
        self._start = perf_counter()
        self._group = group
        self._rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._budget_s = budget_s
        self._short_s = _SHORT_S if budget_s >= _SHORT_BUDGET_S else _MIN_S
        self._progress = progress
        self._sizes = sorted(set(sizes_bytes))
        self._lanes = sorted(set(lanes))
        self._points = list(points or _by_priority(self._sizes, self._lanes))
        if self.ranks < 2:
            raise SpecError(
                f"a network is measured between at least 2 ranks, got {self.ranks}; "
                "start the probe with `stretto lab run` or torchrun"
            )
        if not self._sizes or self._sizes[0] < 4:
            raise SpecError(f"sizes must be at least 4 bytes, got {self._sizes}")
        if not self._lanes or self._lanes[0] < 1:
            raise SpecError(f"numbers of lanes must be at least 1, got {self._lanes}")
        if not (math.isfinite(budget_s) and budget_s > 0):
            raise SpecError(f"budget_s must be a time > 0, got {budget_s}")
        self.device = device or device_of(group)
        self._agreement_group = agreement_group or group
        self._agreement_device = (
            torch.device("cpu") if agreement_group is not None else self.device
        )
        self._own_groups: list[ProcessGroup] = []
        make = lane_group or self._new_group
        self._groups = [make(i) for i in range(self._lanes[-1])]
        self._buffers: list[torch.Tensor] = []
        self._startup_s = 0.0  # of one all-reduce
        self._widest_startup_s = 0.0  # of one on each lane
        self._alone_s_per_byte = 0.0  # per byte of one message, nothing else running
        self._shared_s_per_byte = 0.0  # per byte of all messages, all lanes running

    def _new_group(self, lane: int) -> ProcessGroup:
        made: ProcessGroup
        if self._group is None:
            made = dist.new_group(group_desc=f"stretto probe lane {lane}")
        else:
            made = dist.new_group(
                ranks=dist.get_process_group_ranks(self._group),
                use_local_synchronization=True,
                group_desc=f"stretto probe lane {lane}",
            )
        self._own_groups.append(made)
        return made

    def close(self) -> None:
        for made in self._own_groups:
            dist.destroy_process_group(made)
        self._own_groups.clear()

    def provenance(self) -> dict[str, Any]:
        return {
            "backend": backend_name(self._groups[0], self.device),
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "device": str(self.device),
            "budget_s": self._budget_s,
            "elapsed_s": round(self._agree(self._elapsed_s())[0], 3),
        }

    # -- agreement ---------------------------------------------------------

    def _agree(self, *values: float) -> list[float]:
        """Return rank 0's values on every rank."""
        tensor = torch.tensor(
            values, dtype=torch.float64, device=self._agreement_device
        )
        dist.broadcast(tensor, group=self._agreement_group, group_src=0)
        decided: list[float] = tensor.tolist()
        return decided

    def _slowest(self, rows: list[list[float]]) -> list[list[float]]:
        """Return the largest over ranks, element by element."""
        tensor = torch.tensor(rows, dtype=torch.float64, device=self._agreement_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._agreement_group)
        slowest: list[list[float]] = tensor.tolist()
        return slowest

    def _elapsed_s(self) -> float:
        return perf_counter() - self._start

    # -- collectives -------------------------------------------------------

    def _time(self, size_bytes: int, lanes: int, inner: int) -> float:
        """Return the mean seconds of ``inner`` rounds of simultaneous all-reduces."""
        messages = [self._message(i, size_bytes) for i in range(lanes)]
        groups = self._groups[:lanes]
        barrier(self._agreement_group)
        start = perf_counter()
        for _ in range(inner):
            works = [
                dist.all_reduce(message, group=lane, async_op=True)
                for message, lane in zip(messages, groups, strict=True)
            ]
            for work in works:
                work.wait()
            _synchronize(self.device)
        return (perf_counter() - start) / inner

    def _message(self, lane: int, size_bytes: int) -> torch.Tensor:
        elements = size_bytes // 4
        while len(self._buffers) <= lane:
            self._buffers.append(
                torch.zeros(0, dtype=torch.float32, device=self.device)
            )
        if self._buffers[lane].numel() < elements:
            self._buffers[lane] = torch.zeros(
                elements, dtype=torch.float32, device=self.device
            )
        return self._buffers[lane][:elements]

    def _pilot(self) -> None:
        """Connect every lane and estimate the cost of a collective."""
        widest = self._lanes[-1]
        self._time(4, widest, 1)
        self._widest_startup_s = self._time(4, widest, 1)
        self._startup_s = self._widest_startup_s
        if widest > 1:
            self._startup_s = min(self._startup_s, self._time(4, 1, 1))
        short = self._budget_s < _SHORT_BUDGET_S
        small = _SHORT_PILOT_BYTES if short else _PILOT_BYTES
        small = min(small, self._sizes[-1]) // 4 * 4
        alone_s = self._time(small, 1, 1)
        together_s = self._time(small, widest, 1)
        self._alone_s_per_byte = alone_s / small
        self._shared_s_per_byte = together_s / (small * widest)

    def _estimate_s(self, size_bytes: int, lanes: int) -> float:
        # A connection's first bytes may pass faster than its sustained rate, so the
        # pilot's rates are taken with a margin.
        sending_s = size_bytes * max(
            self._alone_s_per_byte, lanes * self._shared_s_per_byte
        )
        wide = (lanes - 1) / max(1, self._lanes[-1] - 1)
        more_s = wide * (self._widest_startup_s - self._startup_s)
        return _MARGIN * (self._startup_s + more_s + sending_s)

    def _inner(self, estimate_s: float) -> int:
        return max(1, min(_MAX_INNER, int(self._short_s / max(estimate_s, 1e-9))))

    def _choose(self, left_s: float) -> list[_Point]:
        """Return the most useful points that fit in the time left, in order."""
        chosen: list[_Point] = []
        cost_s = 0.0
        for size_bytes, lanes in self._points:
            estimate_s = self._estimate_s(size_bytes, lanes)
            each_s = max(estimate_s, self._short_s) + 0.003
            if cost_s + _MIN_REPETITIONS * each_s > left_s:
                continue
            cost_s += _MIN_REPETITIONS * each_s
            chosen.append(_Point(size_bytes, lanes))
        return chosen

    def collectives(
        self, repetitions: int, *, end_s: float
    ) -> tuple[CollectiveSample, ...]:
        self._pilot()
        decided = self._agree(
            self._startup_s,
            self._widest_startup_s,
            self._alone_s_per_byte,
            self._shared_s_per_byte,
            end_s - self._elapsed_s(),
        )
        self._startup_s, self._widest_startup_s = decided[:2]
        self._alone_s_per_byte, self._shared_s_per_byte = decided[2:4]
        points = self._choose(decided[4])
        if len({p.size_bytes for p in points if p.lanes == self._lanes[0]}) < 2:
            self._refuse_budget()
        self._rounds(points, repetitions, end_s)
        width = max(len(point.durations_s) for point in points)
        rows = self._slowest(
            [p.durations_s + [0.0] * (width - len(p.durations_s)) for p in points]
        )
        samples = []
        for point, row in zip(points, rows, strict=True):
            times_s = row[: len(point.durations_s)]
            if not times_s:
                continue
            samples.append(
                CollectiveSample(
                    size_bytes=point.size_bytes // 4 * 4,
                    lanes=point.lanes,
                    ranks=self.ranks,
                    duration_s=statistics.median(times_s),
                    spread_s=quartile_distance(times_s),
                    repetitions=len(times_s),
                )
            )
        return tuple(sorted(samples, key=lambda s: (s.lanes, s.size_bytes)))

    def _refuse_budget(self) -> None:
        min_s = (
            sum(
                _MIN_REPETITIONS * (self._estimate_s(size, self._lanes[0]) + 0.02)
                for size in self._sizes[:2]
            )
            + self._elapsed_s()
        )
        raise SpecError(
            f"a budget of {format_s(self._budget_s)} is too short for two sizes on "
            f"this network; give at least {format_s(3 * min_s)}"
        )

    def _rounds(self, points: list[_Point], repetitions: int, end_s: float) -> None:
        """Measure in rounds until there are enough or the time is up."""
        total = repetitions * len(points)
        done = 0
        for turn in range(repetitions):
            order = list(points)
            random.Random(turn).shuffle(order)
            for point in order:
                estimate_s = (
                    statistics.median(point.durations_s) * _MARGIN
                    if point.durations_s
                    else self._estimate_s(point.size_bytes, point.lanes)
                )
                inner = self._inner(estimate_s)
                fits = self._elapsed_s() + inner * estimate_s + 0.003 < end_s
                inner = int(self._agree(inner if fits else 0)[0])
                if inner == 0:
                    continue
                point.durations_s.append(
                    self._time(point.size_bytes // 4 * 4, point.lanes, inner)
                )
                done += 1
                self._progress(
                    0.65 * done / total,
                    f"{format_bytes(point.size_bytes)} on "
                    f"{counted(point.lanes, 'lane')}",
                )
            if self._agree(self._elapsed_s())[0] >= end_s:
                break

    # -- contention --------------------------------------------------------

    def contention(self, load: Callable[[], None]) -> tuple[ContentionSample, ...]:
        load()
        units = self._calibrate(load)
        size_bytes = min(_CONTENTION_BYTES, self._sizes[-1]) // 4 * 4
        rows: dict[int, list[list[float]]] = {k: [] for k in self._lanes}
        total = _MIN_REPETITIONS * len(self._lanes)
        longest_s = 0.0
        for turn in range(_MIN_REPETITIONS):
            order = list(self._lanes)
            random.Random(turn).shuffle(order)
            for lanes in order:
                before_s = self._elapsed_s()
                fits = before_s + _MARGIN * longest_s + 0.1 < self._budget_s
                if not self._agree(float(fits))[0]:
                    continue
                # Alone right before beside, so that a machine that becomes slower in
                # the meantime is not mistaken for contention.
                barrier(self._agreement_group)
                alone_s = self._compute(load, units)
                beside = self._beside(load, units, size_bytes, lanes)
                rows[lanes].append([alone_s, *beside])
                longest_s = max(longest_s, self._elapsed_s() - before_s)
                self._progress(
                    0.65 + 0.35 * sum(map(len, rows.values())) / total,
                    f"computation beside {counted(lanes, 'lane')}",
                )
        samples = []
        for lanes, values in rows.items():
            if not values:
                continue
            alone, beside_, collective, collective_beside = zip(
                *self._slowest(values), strict=True
            )
            samples.append(
                ContentionSample(
                    size_bytes=size_bytes,
                    lanes=lanes,
                    ranks=self.ranks,
                    compute_alone_s=statistics.median(alone),
                    compute_overlapped_s=statistics.median(beside_),
                    duration_alone_s=statistics.median(collective),
                    duration_overlapped_s=statistics.median(collective_beside),
                    repetitions=len(values),
                )
            )
        return tuple(samples)

    def _calibrate(self, load: Callable[[], None]) -> int:
        """Return how many pieces of the load make up a measurement."""
        barrier(self._agreement_group)
        three_s = self._compute(load, 3)
        left_s = self._budget_s - self._elapsed_s()
        want_s = min(_LOAD_S, left_s / (6 * len(self._lanes)))
        return int(self._agree(max(1, round(3 * want_s / three_s)))[0])

    def _compute(self, load: Callable[[], None], units: int) -> float:
        start = perf_counter()
        for _ in range(units):
            load()
        # Not the device, on which collectives may run meanwhile.
        _end_of_stream(self.device)
        return perf_counter() - start

    def _beside(
        self, load: Callable[[], None], units: int, size_bytes: int, lanes: int
    ) -> list[float]:
        """Return compute time, and one all-reduce's time alone and beside it."""
        estimate_s = self._time(size_bytes, lanes, 1)
        count = self._agree(max(4, math.ceil(0.5 * _LOAD_S / estimate_s)))[0]
        ends_s = self._stream(size_bytes, lanes, int(count), lambda: 0.0)[1]
        alone_s = statistics.fmean(lane[-1] for lane in ends_s) / int(count)
        # Twice what the computation should take, so that it is never without
        # contention.
        enough = self._agree(math.ceil(2.0 * self._compute(load, units) / alone_s) + 2)[
            0
        ]
        compute_s, ends_s = self._stream(
            size_bytes, lanes, int(enough), lambda: self._compute(load, units)
        )
        done = statistics.fmean(_progress_at(lane, compute_s) for lane in ends_s)
        return [compute_s, alone_s, compute_s / max(done, 0.25)]

    def _stream(
        self,
        size_bytes: int,
        lanes: int,
        count: int,
        compute: Callable[[], float],
    ) -> tuple[float, list[list[float]]]:
        """Run ``count`` all-reduces on each lane, one after another, beside a call.

        Returns the call's result and when each all-reduce ended, from the start.
        """
        messages = [self._message(i, size_bytes) for i in range(lanes)]
        ends_s: list[list[float]] = [[] for _ in range(lanes)]
        failures: list[BaseException] = []
        barrier(self._agreement_group)
        start = perf_counter()

        def ended(lane: int) -> None:
            ends_s[lane].append(perf_counter() - start)

        def drive(drivers: Sequence[int]) -> None:
            try:
                with _own_stream(self.device):
                    for _ in range(count):
                        works = [
                            dist.all_reduce(
                                messages[lane], group=self._groups[lane], async_op=True
                            )
                            for lane in drivers
                        ]
                        for lane, work in zip(drivers, works, strict=True):
                            work.wait()
                            _end_of_stream(self.device)
                            ended(lane)
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        # Where a device chooses the order in which it starts several lanes' kernels,
        # ranks whose threads launch in different orders wait for each other forever.
        rows = [[lane] for lane in range(lanes)]
        if self.device.type == "cuda":
            rows = [list(range(lanes))]
        threads = [
            threading.Thread(target=drive, args=(row,), daemon=True) for row in rows
        ]
        for thread in threads:
            thread.start()
        result_s = compute()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return result_s, ends_s


def count_hosts(group: ProcessGroup | None = None) -> int:
    """Return the number of hosts under a group's ranks, by host name; collective.

    Hosts with different numbers of ranks are counted as one host per rank, because a
    cluster has the same number on each.
    """
    ranks = dist.get_world_size(group)
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, platform.node(), group=group)
    count = len(set(names))
    return count if ranks % count == 0 else ranks


def device_of(group: ProcessGroup | None) -> torch.device:
    """Return the device on which a group's messages must be."""
    # Torch names the backend of a GPU's messages: measuring knows no backends itself.
    if dist.get_default_backend_for_device("cuda") in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend_name(group: Any, device: torch.device) -> str:
    """Return the name of the backend that sends a device's messages.

    Torch calls the backend of a group "undefined" where the program named none.

    Args:
        group: A process group, the default one for ``None``, or a lane.
        device: Where the messages are.
    """
    lane = dist.group.WORLD if group is None else group
    if isinstance(lane, dist.ProcessGroup):
        lane = lane._get_backend(device)  # noqa: SLF001
    # The contract of lanes does not ask for a name; torch's have one.
    name = getattr(lane, "name", None)
    return str(name()) if name is not None else type(lane).__name__


def barrier(group: Any) -> None:
    """Wait for all ranks of a process group, the default one for ``None``, or a lane.

    Torch's function warns of a lane, which is a backend, where there is a GPU.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        dist.barrier(group)
    else:
        group.barrier(opts=dist.BarrierOptions()).wait()


def _own_stream(device: torch.device) -> Any:
    """Return a context in which collectives are not ordered with computation."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def _end_of_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _progress_at(ends_s: Sequence[float], moment_s: float) -> float:
    """Return how many of a lane's collectives were done at a moment, with fractions."""
    before = 0.0
    for i, end_s in enumerate(ends_s):
        if end_s > moment_s:
            return i + (moment_s - before) / (end_s - before)
        before = end_s
    return float(len(ends_s))


def _by_priority(sizes: Sequence[int], lanes: Sequence[int]) -> list[tuple[int, int]]:
    """Return all pairs, those most informative about a training step first."""

    def of_size(size: int) -> float:
        nearest = min(_SIZE_PRIORITY, key=lambda e: abs(e - math.log2(size)))
        return _SIZE_PRIORITY.index(nearest) + 0.01 * abs(nearest - math.log2(size))

    def of_lanes(count: int) -> float:
        return _LANE_PRIORITY.index(count) if count in _LANE_PRIORITY else 2.5

    pairs = [(size, count) for size in sizes for count in lanes]
    pairs.sort(key=lambda p: (of_size(p[0]) + of_lanes(p[1]), p[1], p[0]))
    first = [(size, lanes[0]) for size in sorted(sizes, key=of_size)[:2]]
    return first + [pair for pair in pairs if pair not in first]


def _silent(share: float, line: str) -> None:
    del share, line
