"""Ranks are lost when their processes are, not when they are late."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from stretto import process_identity
from stretto.errors import CommTimeout
from stretto.process_identity import Identity, ProcessState, own_identity, state_of
from stretto.runtime import presence as presence_module
from stretto.runtime.agreement import Agreement
from stretto.runtime.failure import FailureReporter
from stretto.runtime.presence import Presence, call_aside
from stretto.runtime.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

CAUSE = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")


class Processes:
    """Processes that stand for ranks."""

    def __init__(self) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int) -> Identity:
        process = self.running[rank] = subprocess.Popen(["sleep", "60"])
        row = process_identity.stat_row(process.pid)
        assert row is not None
        return dataclasses.replace(own_identity(), pid=process.pid, started=row[1])

    def kill(self, rank: int) -> None:
        self.running[rank].kill()
        deadline = time.perf_counter() + 10.0
        while time.perf_counter() < deadline:
            row = process_identity.stat_row(self.running[rank].pid)
            if row is None or row[0] == "Z":
                return
            time.sleep(0.01)


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


def make_ranks(
    processes: Processes,
    size: int,
    monkeypatch: Any,
    timeout_s: float = 20.0,
    store: Any = None,
) -> list[Ranks]:
    """Ranks 10, 11, ... in this process, each of which a process reports."""
    store = dist.HashStore() if store is None else store
    found = []
    for rank in range(size):
        presence = Presence(store, rank=10 + rank)
        mine = processes.start(rank)
        monkeypatch.setattr(presence_module, "own_identity", lambda mine=mine: mine)
        presence.publish()
        found.append(
            Ranks(
                rank=rank,
                size=size,
                names=tuple(range(10, 10 + size)),
                store=store,
                timeout_s=timeout_s,
                presence=presence,
            )
        )
    return found


def test_a_process_is_known_by_its_start_and_its_host(processes: Processes) -> None:
    mine = own_identity()
    assert state_of(mine) is ProcessState.RUNS
    assert state_of(dataclasses.replace(mine, started="1")) is ProcessState.ENDED
    assert (
        state_of(dataclasses.replace(mine, kernel="elsewhere")) is ProcessState.UNKNOWN
    )
    assert state_of(dataclasses.replace(mine, kernel="")) is ProcessState.UNKNOWN
    other = processes.start(0)
    assert state_of(other) is ProcessState.RUNS
    processes.running[0].send_signal(signal.SIGSTOP)
    deadline = time.perf_counter() + 10.0
    while state_of(other) is ProcessState.RUNS and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert state_of(other) is ProcessState.STOPPED
    processes.kill(0)  # no process has waited for it: a zombie
    assert state_of(other) is ProcessState.ENDED
    processes.running[0].wait()
    assert state_of(other) is ProcessState.ENDED


def test_a_roll_call_names_the_dead_and_not_the_busy(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(processes, 3, monkeypatch)
    processes.kill(2)
    failures = FailureReporter(ranks[1], lambda: None)
    began_s = time.perf_counter()
    text = str(failures.report("the all-reduce of bucket 0", CAUSE))
    assert "rank 12 is gone (process " in text
    assert "rank 10" not in text  # it has not answered, but it runs
    assert time.perf_counter() - began_s < 4.0


def test_who_runs_is_late_or_stuck_rather_than_gone(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(processes, 2, monkeypatch, timeout_s=4.0)
    failures = FailureReporter(ranks[1], lambda: None)
    began_s = time.perf_counter()
    text = str(failures.report("the all-reduce of bucket 0", RuntimeError("Timed out")))
    assert "rank 10 is late or stuck" in text
    assert "still runs" in text
    # A quarter of a short timeout, where a long one would have 5 s.
    assert time.perf_counter() - began_s < 3.0


def test_the_exception_that_ended_a_rank_is_reported(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(processes, 4, monkeypatch)
    for rank, exc in ((2, ValueError("mine")), (3, CommTimeout("rank 13: lost"))):
        presence = ranks[rank].presence
        assert presence is not None
        presence.note_exception(exc)
        processes.kill(rank)
    text = str(FailureReporter(ranks[1], lambda: None).report("a collective", CAUSE))
    # Rank 13 ended because of rank 12.
    assert "rank 12 is gone" in text
    assert "ValueError: mine" in text
    assert "13" not in text.partition("Check the log")[2].partition("Cause")[0]


class LostStore(dist.Store):
    """A store that answers until its process is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self.is_lost = False

    def set(self, key: str, value: Any) -> None:
        self._require()
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self._require()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._require()
        return all(key in self._values for key in keys)

    def _require(self) -> None:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("ended", [(2,), (2, 3)])
def test_without_the_store_no_healthy_rank_is_named_as_lost(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, ended: tuple[int, ...]
) -> None:
    """Ranks that ended because of another have said so in the store only."""
    store = LostStore()
    ranks = make_ranks(processes, 4, monkeypatch, store=store)
    presence = ranks[1].presence
    assert presence is not None
    presence.learn(ranks[1].names)
    for rank in ended:
        processes.kill(rank)
    store.is_lost = True
    text = str(FailureReporter(ranks[1], lambda: None).report("a collective", CAUSE))
    if ended == (2,):
        assert "rank 12 is gone (process " in text
    else:
        assert "not heard from: ranks 12, 13 (process " in text
        assert "gone" not in text


def test_what_one_host_sees_is_reported_to_others(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(processes, 3, monkeypatch)
    processes.kill(2)
    FailureReporter(ranks[1], lambda: None).report("a collective", CAUSE)
    # Now as on another host.
    monkeypatch.setattr(process_identity, "kernel_id", lambda: "another")
    text = str(FailureReporter(ranks[0], lambda: None).report("a collective", CAUSE))
    assert "rank 12 is gone (process " in text


def test_one_models_failure_is_not_the_next_ones(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(processes, 2, monkeypatch, timeout_s=4.0)
    desks = [
        [FailureReporter(r, lambda: None, key=lambda key=key: key) for r in ranks]
        for key in ("1", "2")
    ]
    desks[0][0].report("a collective", CAUSE)
    assert desks[0][1].others_failed() == "another rank has given up"
    assert desks[1][1].others_failed() is None
    assert "rank 10 is late" in str(desks[1][1].report("a collective", CAUSE))


@pytest.mark.parametrize("came", [False, True])
def test_a_meeting_ends_when_who_is_missing_has_ended(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, came: Callable[[], bool]
) -> None:
    ranks = make_ranks(processes, 2, monkeypatch, timeout_s=60.0)
    if came:
        # It came before it ended: the meeting takes place.
        ranks[0].store.set("serial/1", "0")
        ranks[0].store.set("agree/1/0/1", '{"purpose": "meet"}')
    processes.kill(1)
    agreement = Agreement(ranks[0])
    if came:
        agreement.require_same("meet", {})
        return
    began_s = time.perf_counter()
    with pytest.raises(CommTimeout, match=r"rank 10 can't meet: rank 11 is gone \(pro"):
        agreement.require_same("meet", {})
    assert time.perf_counter() - began_s < 10.0


def test_a_rank_that_was_started_again_is_not_lost(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(processes, 2, monkeypatch)
    mine = ranks[0].presence
    assert mine is not None
    mine.learn([11])
    processes.kill(1)
    again = Presence(ranks[0].store, rank=11)
    monkeypatch.setattr(presence_module, "own_identity", lambda: processes.start(2))
    again.publish()
    assert mine.ended([11]) == {}
    processes.kill(2)
    assert set(mine.ended([11])) == {11}


class Resource:
    """Something that a call refers to."""

    def open(self) -> None:
        raise RuntimeError("refused")


def test_a_call_aside_that_failed_is_freed_with_its_error() -> None:
    gc.disable()
    try:
        resource = Resource()
        freed = weakref.ref(resource)
        with contextlib.suppress(RuntimeError):
            call_aside(resource.open, name="test-opening", look=lambda: False)
        del resource
        for thread in threading.enumerate():
            if thread.name == "test-opening":
                thread.join()
        assert freed() is None
    finally:
        gc.enable()
