"""Errors of one rank, as ranks that wait for it find them."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stretto.burst import refusals
from stretto.burst.refusals import Refusals
from stretto.errors import StrettoError
from stretto.runtime.ranks import Ranks

ERROR = StrettoError("its values are not current")
FOUND = "rank 1 stopped with an error of its own: StrettoError: its values are not"


class Job:
    """Two ranks' models over one store."""

    def __init__(self):
        self._store = dist.HashStore()
        self._connections = [PrefixStore(f"of {r}", self._store) for r in range(2)]
        self._made = []
        self.stopped = threading.Event()
        self.why = ""

    def model(self, rank, serial, *, restarted=False):
        if restarted:
            self._connections[rank] = PrefixStore("again", self._store)
        # Two connections to the same keys.
        connection = self._connections[rank]
        found = Refusals(
            Ranks(
                rank=rank,
                size=2,
                names=(0, 1),
                store=Shared("stretto", connection, self._store),
                timeout_s=60.0,
            ),
            serial,
            self._stop,
        )
        self._made.append(found)
        return found

    def _stop(self, why):
        self.why = why
        self.stopped.set()

    def close(self):
        for each in self._made:
            each.close()


class Shared(PrefixStore):
    """A rank's prefix of the one store, with the rank's own connection."""

    def __init__(self, prefix, connection, store):
        super().__init__(prefix, store)
        self.connection = connection

    @property
    def underlying_store(self):
        return self.connection


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


def test_a_rank_that_waits_in_another_model_finds_an_error(job):
    waiting, _ = job.model(0, 2), job.model(1, 2)
    job.model(1, 1).tell(ERROR)
    assert FOUND in waiting.explain("a forward")


def test_an_error_inside_a_step_is_found_from_another_model(job):
    waiting, _ = job.model(0, 2), job.model(1, 2)
    job.model(1, 1).tell(ERROR, inside=True)
    assert FOUND in waiting.explain("a forward")


def test_a_wait_in_another_model_ends(job, monkeypatch):
    monkeypatch.setattr(refusals, "GRACE_S", 0.0)
    monkeypatch.setattr(refusals, "_POLL_S", 0.01)
    waiting = job.model(0, 2)
    job.model(1, 1).tell(ERROR)
    with waiting.waiting("a forward"):
        assert job.stopped.wait(20)
    assert FOUND in job.why


def test_an_error_inside_a_step_of_another_model_leaves_time_to_continue(
    job, monkeypatch
):
    monkeypatch.setattr(refusals, "_POLL_S", 0.01)
    waiting = job.model(0, 2)
    job.model(1, 1).tell(ERROR, inside=True)
    with waiting.waiting("a forward"):
        assert not job.stopped.wait(0.3)


def test_a_rank_learns_that_others_stopped_waiting_in_another_model(job, monkeypatch):
    monkeypatch.setattr(refusals, "GRACE_S", 0.0)
    monkeypatch.setattr(refusals, "_POLL_S", 0.01)
    waiting, awaited = job.model(0, 2), job.model(1, 2)
    job.model(1, 1).tell(ERROR)
    with waiting.waiting("a forward"):
        assert job.stopped.wait(20)
    assert awaited.given_up() == f"StrettoError: {ERROR}"


def test_a_call_of_any_model_shows_that_the_rank_continues(job):
    waiting, continues = job.model(0, 2), job.model(1, 2)
    job.model(1, 1).tell(ERROR)
    continues.withdraw()
    assert waiting.explain("a forward") == ""


def test_a_rank_that_continues_with_another_model_is_not_awaited_in_the_first(job):
    waiting, continues = job.model(0, 1), job.model(1, 2)
    job.model(1, 1).tell(ERROR)
    continues.withdraw()
    assert FOUND in waiting.explain("a forward")


def test_a_later_error_in_another_model_is_found_after_an_earlier_one(job):
    waiting, first, second = job.model(0, 3), job.model(1, 1), job.model(1, 2)
    first.tell(StrettoError("earlier"))
    second.withdraw()
    second.tell(ERROR)
    assert FOUND in waiting.explain("a forward")


def test_an_error_of_an_earlier_process_is_not_found(job):
    waiting = job.model(0, 2)
    job.model(1, 1).tell(ERROR)
    job.model(1, 2, restarted=True)
    assert waiting.explain("a forward") == ""
