"""Waits that end at the same moment as their collective."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from stretto.errors import CommTimeout
from stretto.runtime.failure import FailureReporter, forget_frames
from stretto.runtime.ranks import Ranks


class EndsAfterALook:
    """A work that ends between the end of a wait and the question whether it has."""

    def __init__(self, error: str = "") -> None:
        self.looks, self._error = 0, error

    def wait(self, timeout: Any = None) -> None:
        if timeout is not None:
            self.looks += 1
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def reporter() -> FailureReporter:
    ranks = Ranks(
        rank=0, size=1, names=(0,), store=dist.HashStore(), timeout_s=2.0, presence=None
    )
    return FailureReporter(ranks, lambda: None)


def test_a_collective_that_ends_just_after_a_look_has_not_failed() -> None:
    work, failures = EndsAfterALook(), reporter()
    failures.wait(work, "an all-reduce")
    assert work.looks == 1
    assert failures.error is None


def test_a_collective_that_fails_just_after_a_look_is_reported_with_its_error() -> None:
    failures = reporter()
    with pytest.raises(
        CommTimeout, match=r"an all-reduce lost its connection.*by peer"
    ):
        failures.wait(EndsAfterALook("Connection reset by peer"), "an all-reduce")
    assert failures.error is not None


def test_an_error_names_what_failed_on_the_other_ranks() -> None:
    store = dist.HashStore()

    def reporter_of(rank: int) -> FailureReporter:
        ranks = Ranks(
            rank=rank, size=2, names=(0, 1), store=store, timeout_s=2.0, presence=None
        )
        return FailureReporter(ranks, lambda: None)

    cause = RuntimeError("Timed out waiting")
    with ThreadPoolExecutor() as pool:
        errors = list(
            pool.map(
                lambda rank, place: reporter_of(rank).report(place, cause),
                (0, 1),
                ("the norm of all gradients", "a forward"),
            )
        )
    assert "every rank still answers (rank 1: a forward)" in str(errors[0])
    assert "(rank 0: the norm of all gradients)" in str(errors[1])


def test_an_error_keeps_its_frames_no_longer_than_it_is_handled() -> None:
    failures = reporter()
    gc.disable()
    try:
        work = EndsAfterALook("Connection reset by peer")
        with pytest.raises(CommTimeout) as caught:
            failures.wait(work, "an all-reduce")
        del caught
        freed = weakref.ref(work)
        forget_frames(failures.error)
        del work
        assert freed() is None
    finally:
        gc.enable()
