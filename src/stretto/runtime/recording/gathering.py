"""Gather all ranks' records of a step on rank 0.

# Note [Why the store, and a thread]
A collective on the training's process group would make every rank wait for the slowest
one, and would hang if a rank died. Instead, a separate thread queries the store over a
connection of its own (a wait blocks a connection, and training may need its one), so
training continues. All waits are bounded: a rank that is late is left out and named.
The thread ends by itself, and a process with nothing else left to do waits for it.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, final

import msgspec

from stretto.logs import get_logger
from stretto.process_identity import host_name
from stretto.runtime.recording.clocks import (
    ClockMap,
    ClockPoint,
    answer_rank,
    ask_reference,
    clock_name,
)
from stretto.runtime.recording.step import StepMarks
from stretto.runtime.store import own_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)

GATHER_S = 15.0
"""How long rank 0 waits for the others' records, and they for its clock."""

_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's record, and its clock's offset from the reference's."""

    host: str

    steps: tuple[StepMarks, ...]

    clock: ClockMap = field(default_factory=ClockMap)


if TYPE_CHECKING:
    OnGathered = Callable[[dict[int, RankRecord], list[int]], None]
    """Takes the records by rank, and the ranks without a record."""


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
        own = RankRecord(host=host_name(), steps=steps())
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
