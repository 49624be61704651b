"""Lanes over NCCL: communicators, launches. Run on one GPU only.

Pure functions decide what to open; the class at the end calls NCCL.

# Note [Communicators of a lane]
A communicator's CTAs are fixed when it is created, so a lane whose buckets have
different resources needs a communicator for each. Collectives on one lane must run one
after another: those communicators are split from the largest one with ``splitShare``,
so that they share one device stream, on which NCCL serializes the family's launches,
and one set of buffers. Different lanes must overlap: they are never split from one
another but have communicators of their own.

# Note [Deadlock]
A collective's CTAs spin until the peers' CTAs arrive. If two lanes' kernels do not both
fit on a device, each may occupy, on its own rank, the space that the other needs. Three
measures prevent this: every rank launches in plan order from one thread (the
Reducer's); NCCL is set to start kernels in that order; and all lanes together may use
at most half of the device's multiprocessors, so that they fit even if the NCCL setting
came too late. An NCCL CTA occupies nearly a whole multiprocessor.

# Note [Streams and buffers]
A lane's collective runs on the communicator's own stream, which first waits for the
work queued on the launching thread's stream: the copies into the bucket. The bucket's
memory belongs to the Reducer's stream, so the caching allocator could reuse it while a
lane still reads it. Until the work is waited for, torch holds a reference to the
tensor. That wait is ordered on a stream, never by the host, and the stream that waited
is recorded with the buffer (`record_stream`), so that the allocator reuses the memory
only when that stream has reached that point. The Reducer keeps its buckets anyway; a
replaced Reducer, or a user's hook with buffers of its own, does not.

# Note [Ending communicators]
`abort` ends kernels that wait for a lost peer; several communicators are aborted in one
NCCL group, because one abort may wait for another's kernel. `close` waits for the
device, then destroys. Both may hang on a stuck device, so both run in a thread that is
abandoned after a time limit.

# Note [Launches]
Nothing here waits for the device: streams wait for works, and the Reducer's future has
the device, so that its own wait orders streams too. (A future that `collect_all`
combines from several has no device; waiting for it would order nothing.)
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.futures import Future

from stretto.errors import PlanMismatch
from stretto.logs import get_logger, warn_experimental
from stretto.runtime.backends.base import (
    AbstractBackend,
    AbstractLanes,
    AbstractStreamLaunch,
)
from stretto.runtime.backends.nccl_settings import (
    LAUNCH_ORDER,
    OrderSetting,
    check_settings,
    launch_order,
    nccl_settings,
)
from stretto.runtime.launch import Launched
from stretto.runtime.ranks import timeout_of
from stretto.runtime.time_limit import call_within

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.backends.base import Need
    from stretto.runtime.bucket_schedule import BucketSchedule, Slice
    from stretto.runtime.ranks import Ranks
    from stretto.runtime.recording.step import AbstractStepObserver

    Reduce = Callable[[list[torch.Tensor], Any], Any]
    """A lane's ``allreduce``."""


_log = get_logger(__name__)
_logged: set[str] = set()

SHARE_OF_DEVICE = 0.5
"""Share of the multiprocessors that all lanes together may use."""

USUAL_LANES = 8
"""Lanes without a resource are limited as if there were this many, so that plans of two
to eight lanes use the same communicators."""

_END_S = 10.0
_SPLIT_COLOR = 1  # any number, the same on all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator to create."""

    lane: int

    ctas: int | None
    """Exact number of CTAs for its collectives; ``None`` means NCCL's choice."""

    max_ctas: int | None = None
    """Maximum CTAs if ``ctas`` is ``None``; ``None`` means NCCL's own limit."""

    family: bool = False
    """Whether it shares its device stream and buffers with others of its lane."""

    parent: Communicator | None = None
    """The communicator it is split from; ``None`` if it is created on its own."""

    @property
    def name(self) -> str:
        """A name that is unique in the pool and the same on all ranks."""
        limit = f"{self.ctas}" if self.ctas else f"most{self.max_ctas}"
        if self.parent is not None:
            return f"{self.parent.name}/{limit}"
        return f"{self.lane}/{limit}{'f' if self.family else ''}"


def max_ctas_of(multiprocessors: int) -> int:
    """Return the CTAs that all lanes together may use on a device."""
    return max(1, int(SHARE_OF_DEVICE * multiprocessors))


def communicators_of(
    needs: Sequence[tuple[int, int | None]], *, multiprocessors: int
) -> dict[tuple[int, int | None], Communicator]:
    """Return the communicator for each lane and resource, parents before children.

    A lane without a resource has NCCL's own number of CTAs if it is the only lane;
    several such lanes are limited to equal shares of the rest.

    Raises:
        PlanMismatch: all lanes together use too much of the device.
    """
    levels: dict[int, list[int | None]] = {}
    for lane, resource in needs:
        levels.setdefault(lane, []).append(resource)
    share = _free_share(levels, multiprocessors)
    made: dict[tuple[int, int | None], Communicator] = {}
    for lane, resources in levels.items():
        stated = [r for r in resources if r is not None]
        if len(resources) == 1:
            made[lane, resources[0]] = Communicator(
                lane=lane,
                ctas=resources[0],
                max_ctas=None if stated else share,
            )
            continue
        largest = max(stated)
        parent = Communicator(lane=lane, ctas=largest, family=True)
        made[lane, largest] = parent
        for resource in resources:
            if resource != largest:
                # A child has at most as many channels as its parent, stated or not.
                made[lane, resource] = Communicator(
                    lane=lane,
                    ctas=resource,
                    max_ctas=None if resource else largest,
                    family=True,
                    parent=parent,
                )
    return made


def _free_share(
    levels: dict[int, list[int | None]], multiprocessors: int
) -> int | None:
    """Return the CTAs for each lane without a resource; ``None`` means no limit."""
    max_ctas = max_ctas_of(multiprocessors)
    stated = {
        lane: max(r for r in resources if r is not None)
        for lane, resources in levels.items()
        if any(r is not None for r in resources)
    }
    silent = len(levels) - len(stated)
    total = sum(stated.values())
    if total + silent > max_ctas:
        shown = ", ".join(f"lane {lane}: {ctas}" for lane, ctas in stated.items())
        more = f" and {silent} lanes of unstated resource" if silent else ""
        raise PlanMismatch(
            f"the plan's lanes may use {total} CTAs at once ({shown}{more}), but "
            f"collectives may use {max_ctas} of this device's {multiprocessors} "
            "multiprocessors: more could end in a deadlock. Plan with fewer lanes "
            "or less resource."
        )
    if silent and len(levels) > 1:
        return max(1, (max_ctas - total) // max(silent, USUAL_LANES))
    return None


def check(
    needs: Sequence[tuple[int, int | None]],
    settings: dict[str, tuple[str, str]],
    *,
    multiprocessors: int,
) -> list[str]:
    """Require that a plan's lanes can be opened; return the warnings.

    Raises:
        PlanMismatch: see `communicators_of`, `check_settings` and `launch_order`.
    """
    warnings = check_settings(settings, sets_ctas=any(r is not None for _, r in needs))
    communicators_of(needs, multiprocessors=multiprocessors)
    launch_order(settings, lanes=len({lane for lane, _ in needs}), launched=False)
    return warnings


def check_here(
    needs: Sequence[tuple[int, int | None]], _ranks: int, device: torch.device
) -> None:
    """Run `check` against this process's environment and device."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    for line in check(needs, nccl_settings(os.environ), multiprocessors=count):
        _log_once(line)


def fill_options(options: Any, wanted: Communicator, parent: Any, ranks: Ranks) -> Any:
    """Fill the options of a new communicator; ``options`` must be a new object.

    Torch writes to it. A feature missing from a torch release is detected on the object
    itself, not by its version.



    Raises:
        PlanMismatch: this torch can't split communicators that share resources.
    """
    options._timeout = timeout_of(ranks.timeout_s)  # noqa: SLF001
    if hasattr(options, "global_ranks_in_group"):
        options.global_ranks_in_group = list(ranks.names)
    if hasattr(options, "group_name"):
        options.group_name = f"stretto lane {wanted.name}"
    if wanted.ctas is not None:
        # Equal values pin the number of channels, even above NCCL's own choice.
        options.config.min_ctas = wanted.ctas
        options.config.max_ctas = wanted.ctas
        # A cluster of CTAs starts only when all of it fits at once; next to computation
        # single CTAs start sooner. Then the count alone sets what is used.
        options.config.cga_cluster_size = 1
    elif wanted.max_ctas is not None:
        options.config.max_ctas = wanted.max_ctas
    if wanted.family:
        if not hasattr(options.config, "split_share") or not hasattr(
            options, "split_from"
        ):
            raise PlanMismatch(
                f"lane {wanted.lane} has buckets of different resource, for which this "
                f"torch ({torch.__version__}) can't make communicators: plan with one "
                "resource per lane, or install torch 2.11 or newer."
            )
        options.config.split_share = 1
        if parent is not None:
            options.split_from = parent
            options.split_color = _SPLIT_COLOR
    return options


@final
class NcclBackend(AbstractBackend):
    """NCCL: completion is seen by the device's streams. Run on one GPU only."""

    name = "nccl"
    device_type = "cuda"
    completes_on_host = False
    pairs_by_order = True
    # Communicators must end while the driver still works.
    ends_at_exit = True

    @property
    def kind(self) -> Any:
        """Torch's type."""
        return dist.ProcessGroup.BackendType.NCCL

    def is_available(self) -> bool:
        """Return whether there is a device, and torch was built with NCCL."""
        return torch.cuda.is_available() and dist.is_nccl_available()

    def max_resource(self, device: torch.device) -> int:
        """Return the CTAs that all lanes together may use on a device."""
        return max_ctas_of(
            torch.cuda.get_device_properties(device).multi_processor_count
        )

    def library_versions(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the built and the loaded version, as far as torch reports them."""
        if not dist.is_nccl_available():
            return None, None
        built: Any = torch.cuda.nccl.version()
        ask = getattr(dist.ProcessGroupNCCL, "get_runtime_nccl_version", None)
        return tuple(built), None if ask is None else tuple(ask())

    def settings(self, environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return NCCL's variables, from the environment and from its files."""
        return nccl_settings(environment)

    def prepare_process(self) -> None:
        """Choose the launch order before NCCL reads it, at its first launch.

        A plan may follow later, when DDP's own collectives have run.
        """
        if self.is_available() and LAUNCH_ORDER not in nccl_settings(os.environ):
            _choose_order(lanes=2, warns=False)

    def check(self, needs: Sequence[Need], ranks: int, device: torch.device) -> None:
        """Require that NCCL's settings and the device allow these lanes."""
        check_here(needs, ranks, device)

    def lanes(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> NcclLanes:
        """Return the lanes of a model."""
        del end_requests, notes  # opening ends at its own timeout
        if ranks.rank == 0:
            warn_experimental(_log, "lanes on NCCL")
        return NcclLanes(ranks=ranks, store_for=store_for, device=device)

    def collectives_per_slice(self, resource: int | None) -> int:
        """Return 1: ``resource`` is the number of CTAs of one collective."""
        del resource
        return 1

    def stream_launch(self, device: torch.device) -> NcclLaunch:
        """Return what launches buckets on the device's streams."""
        return NcclLaunch(device)


@final
class NcclLanes(AbstractLanes):
    """Creates communicators and ends them."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
    ) -> None:
        self._ranks = ranks
        self._store_for = store_for
        self._device = device
        self._open: dict[Communicator, Any] = {}
        self._made: Counter[Communicator] = Counter()

    def open(
        self, needs: Sequence[tuple[int, int | None]]
    ) -> dict[tuple[int, int | None], Any]:
        """Return the communicators for one plan's lanes; collective."""
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        wanted = communicators_of(needs, multiprocessors=count)
        lanes = {lane for lane, _ in needs} | {c.lane for c in self._open}
        _choose_order(len(lanes), warns=True)
        for communicator in wanted.values():  # parents come first
            if communicator not in self._open:
                self._open[communicator] = self._make(communicator)
        return {need: self._open[wanted[need]] for need in needs}

    def _make(self, wanted: Communicator) -> Any:
        # A new object each time: torch writes timeout, name and parent into it.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        parent = None if wanted.parent is None else self._open[wanted.parent]
        fill_options(options, wanted, parent, self._ranks)
        # A reopened communicator must not find the first one's id.
        self._made[wanted] += 1
        times = self._made[wanted]
        name = wanted.name + (f"/{times}" if times > 1 else "")
        backend = dist.ProcessGroupNCCL(
            self._store_for(name), self._ranks.rank, self._ranks.size, options
        )
        # Connect now rather than in the first collective, which would wait within a
        # step.
        backend.eager_connect_single_device(self._device)
        return backend

    def abort(self) -> None:
        """End all kernels and connections, within a time limit."""
        backends = list(self._open.values())
        if not within(_END_S, lambda: abort_all(backends)):
            _log.error("cannot abort the NCCL communicators in %g s", _END_S)

    def retain(self, lanes: Container[int]) -> None:
        """End the communicators of other lanes."""
        self._end([c for c in self._open if c.lane not in lanes])

    def close(self) -> None:
        """End communicators whose collectives are done, within a time limit."""
        self._end(list(self._open))

    def _end(self, communicators: Sequence[Communicator]) -> None:
        backends = [self._open.pop(communicator) for communicator in communicators]
        if not backends:
            return

        def end() -> None:
            torch.cuda.synchronize(self._device)
            for backend in reversed(backends):  # children before their parents
                backend.shutdown()

        if not within(_END_S, end):
            within(_END_S, lambda: abort_all(backends))


def abort_all(backends: Iterable[Any]) -> None:
    """Abort communicators in one NCCL group."""
    ordered = list(backends)[::-1]
    if not ordered:
        return
    grouped = hasattr(ordered[0], "_group_start")
    if grouped:
        ordered[0]._group_start()  # noqa: SLF001
    for backend in ordered:
        with contextlib.suppress(RuntimeError):  # it has already ended: continue
            backend.abort()
    if grouped:
        ordered[0]._group_end()  # noqa: SLF001


def within(seconds: float, call: Callable[[], None]) -> bool:
    """Return whether a call that may hang succeeded in time; else abandon it."""
    done = call_within(
        seconds,
        call,
        thread_name="stretto-nccl-end",
        on_error=lambda error: _log.warning("ending NCCL communicators: %s", error),
    )
    return bool(done.values)


def _choose_order(lanes: int, *, warns: bool) -> None:
    settings = nccl_settings(os.environ)
    order = launch_order(settings, lanes=lanes, launched=_collectives_issued() > 0)
    if order is OrderSetting.SET:
        os.environ[LAUNCH_ORDER] = "1"
    elif order is OrderSetting.TOO_LATE and warns:
        _log_once(
            f"{LAUNCH_ORDER} was not set when NCCL ran its first collective: lanes "
            f"may deadlock if they do not fit at once. Start with {LAUNCH_ORDER}=1"
        )


def _collectives_issued() -> int:
    """Return the number of NCCL collectives issued by this process's groups so far."""
    issued = 0
    for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001
        with contextlib.suppress(RuntimeError):
            backend: Any = group._get_backend(torch.device("cuda"))  # noqa: SLF001
            if "nccl" in backend.name():
                issued += backend._get_sequence_number_for_group()  # noqa: SLF001
    return issued


def _log_once(line: str) -> None:
    if line not in _logged:
        _logged.add(line)
        _log.warning("%s", line)


@final
class NcclLaunch(AbstractStreamLaunch):
    """Launches a plan's buckets; other streams than the computation's wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream waits for the slices of every bucket: the Reducer waits for buckets
        # in launch order, so an earlier bucket does not delay a later one.
        self._gather = torch.cuda.Stream(device)
        self._seen: dict[int, torch.cuda.Stream] = {}

    def future(self) -> Future[Any]:
        """Return a future whose value is used on this device's streams."""
        return Future(devices=[self._device])

    def launcher(
        self,
        schedule: BucketSchedule,
        reduces: Sequence[Reduce],
        observer: AbstractStepObserver | None,
    ) -> Callable[[torch.Tensor, Any], dist.Work]:
        """Return a function that starts a bucket's collectives."""
        rows = list(zip(reduces, schedule.slices, strict=True))
        if observer is not None:
            return partial(self._observed, observer, schedule.index, rows)
        if len(rows) == 1:
            return partial(_native, rows[0][0])
        return partial(self._slices, rows)

    def _slices(
        self,
        rows: Sequence[tuple[Reduce, Slice]],
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        works = [reduce([buffer[p.start : p.end]], opts) for reduce, p in rows]
        return self._gathered(works, buffer)

    def _observed(
        self,
        observer: AbstractStepObserver,
        index: int,
        rows: Sequence[tuple[Reduce, Slice]],
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        """Report each slice to an observer, on the stream on which the slice ends.

        An event that the observer records there completes when the slice has ended; the
        host's time is that of the launch.
        """
        observer.bucket_launched(index, perf_counter())
        works = []
        for reduce, part in rows:
            work = reduce([buffer[part.start : part.end]], opts)
            with torch.cuda.stream(self._stream_of(part.lane)):
                work.wait()
                elements = part.end - part.start
                observer.slice_finished(index, part.lane, elements, perf_counter())
            works.append(work)
        return self._gathered(works, buffer)

    def _gathered(self, works: Sequence[Any], buffer: torch.Tensor) -> dist.Work:
        future = self.future()
        with torch.cuda.stream(self._gather):
            for work in works:
                work.wait()
            # Record the buffer only now: this stream has waited for every lane that
            # reads it, so the allocator can track this stream alone.
            buffer.record_stream(self._gather)
            future.set_result(buffer)
        return Launched(future)

    def _stream_of(self, lane: int) -> torch.cuda.Stream:
        if lane not in self._seen:
            self._seen[lane] = torch.cuda.Stream(self._device)
        return self._seen[lane]


def _native(reduce: Reduce, buffer: torch.Tensor, opts: Any) -> dist.Work:
    """Return NCCL's own work: its future already has the device."""
    work: dist.Work = reduce([buffer], opts)
    return work
