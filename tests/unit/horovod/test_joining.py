"""A rank that joins a job which trains already, before it has joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import stretto.horovod.torch as hvd
from stretto import variable_names
from stretto.horovod.topology import without_gaps

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(variable_names.JOINS, "2")
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("joining")
def test_it_counts_itself_as_the_last_rank() -> None:
    assert (hvd.rank(), hvd.size()) == (2, 3)


@pytest.mark.usefixtures("joining")
def test_its_collectives_are_refused_because_others_do_not_make_them() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="Move the call"):
        hvd.allreduce(torch.ones(1))
    with pytest.raises(hvd.HorovodInternalError, match="Move the call"):
        hvd.broadcast_parameters(torch.nn.Linear(1, 1).state_dict(), 0)


def test_the_places_of_lost_ranks_are_given_to_the_next_ones() -> None:
    hosts, places = ["a", "b", "a", "b", "a"], [3, 0, 1, 2, 0]
    assert without_gaps(hosts, places) == [2, 0, 1, 1, 0]
