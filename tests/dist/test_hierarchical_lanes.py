"""Lanes in two levels, on four ranks that count as two hosts."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest
import torch

from stretto.errors import PlanMismatch
from stretto.runtime.backends import gloo, hierarchical
from stretto.runtime.backends.hierarchical_lane import PIECE_BYTES, HierarchicalLane
from stretto.runtime.failure import FailureReporter
from stretto.testing import _backend_cases as cases
from stretto.testing._backend_bench import BackendBench

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.dist.conftest import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

BACKEND = "hierarchical"


def _bench(rank: int, hosts: str) -> BackendBench:
    """Return a bench; ``hosts`` has a letter per rank."""
    hierarchical.own_host = lambda: f"host-{hosts[rank]} k n"
    return BackendBench(BACKEND, torch.device("cpu"))


def _holds(rank: int, size: int, case: str, hosts: str) -> str:
    bench = _bench(rank, hosts)
    getattr(cases, case)(bench)
    return "done"


def _kinds_of_lanes(rank: int, size: int, hosts: str) -> str:
    pool = _bench(rank, hosts).pool()
    lane = pool.lane(0)
    value = torch.full((3,), 2.0**rank)
    lane.allreduce([value]).wait()
    assert value.tolist() == [2.0**size - 1] * 3
    pool.close()
    return type(lane).__name__


def _pieces(rank: int, size: int) -> None:
    """Reduce messages of more than one piece, and of odd lengths."""
    bench = _bench(rank, "aabb")
    pool = bench.pool()
    lane = pool.lane(0)
    assert isinstance(lane, HierarchicalLane)
    for elements in (0, 1, 3, PIECE_BYTES // 8, PIECE_BYTES // 2 + 5):
        theirs = [r.double() for r in bench.all_values(torch.float64, elements)]
        found = theirs[rank].clone()
        lane.allreduce([found]).wait()
        wanted = (theirs[0] + theirs[1]) + (theirs[2] + theirs[3])
        assert torch.equal(found, wanted), elements
    columns = torch.arange(12.0).view(3, 4).t()[:, 1:]
    lane.allreduce([columns]).wait()
    assert torch.equal(columns, 4 * torch.arange(12.0).view(3, 4).t()[:, 1:])
    values = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    lane.allreduce([values]).wait()
    assert values.tolist() == [4 + 6j] * 3
    pool.close()


def _sparse(rank: int, size: int) -> None:
    pool = _bench(rank, "abab").pool()
    at = torch.tensor([[rank, 4]])
    value = torch.sparse_coo_tensor(at, torch.ones(2), (5,))
    pool.lane(0).allreduce([value]).wait()
    assert value.to_dense().tolist() == [1.0, 1.0, 1.0, 1.0, 4.0]
    pool.close()


def _refused(rank: int, size: int) -> str:
    pool = _bench(rank, "aab").pool()
    with pytest.raises(PlanMismatch, match=r"2 on host-a; 1 on host-b: start as many"):
        pool.lane(0)
    return "done"


def _unopened(rank: int, size: int) -> str:
    """One rank can't open its lanes across hosts: no rank waits for it."""
    bench = _bench(rank, "aabb")
    if rank == 3:

        def fails(_: int) -> object:
            raise RuntimeError(os.strerror(errno.EMFILE))

        gloo._gloo_device = fails
    with bench.within(25.0), pytest.raises(PlanMismatch) as caught:
        bench.pool().lane(0)
    return str(caught.value)


def _late(rank: int, size: int) -> str:
    """A rank takes no part: ranks that are not connected to it report it, too."""
    bench = _bench(rank, "aabb")
    pool = bench.pool(2.0)
    lane = pool.lane(0)
    lane.allreduce([torch.ones(4)]).wait()
    if rank == 1:
        time.sleep(8.0)
        return "rank 1"
    with bench.within(cases.BOUND_S), pytest.raises(RuntimeError) as caught:
        lane.allreduce([torch.ones(1 << 18)]).wait()
    reporter = FailureReporter(bench.ranks_for(2.0), pool.abort)
    return str(reporter.report("the all-reduce", caught.value))


@pytest.mark.parametrize("hosts", ["abab", "abba"])
@pytest.mark.parametrize("case", ["sums", "other_collectives"])
def test_hosts_need_not_have_ranks_in_order(
    ranks: Ranks, case: str, hosts: str
) -> None:
    assert ranks(_holds, 4, case, hosts, timeout_s=60) == ["done"] * 4


@pytest.mark.parametrize(
    "case",
    [
        *("sums", "other_collectives", "in_order", "lanes_at_once", "operations"),
        *("futures", "resources", "retain", "reopened"),
        *("barrier", "retain_frees", "close_queued", "close_alone"),
    ],
)
def test_the_contract_holds_on_two_hosts_of_two(ranks: Ranks, case: str) -> None:
    assert ranks(_holds, 4, case, "aabb", timeout_s=90) == ["done"] * 4


def test_a_dead_rank_is_named_on_both_hosts(ranks: Ranks) -> None:
    found = ranks(_holds, 4, "dead_rank", "aabb", errors=True, timeout_s=90)
    assert found[:3] == ["done"] * 3, found


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [("aaaa", "LocalLane"), ("abcd", "ProcessGroupGloo"), ("aabb", "HierarchicalLane")],
)
def test_one_level_is_used_where_there_is_one(
    ranks: Ranks, hosts: str, kind: str
) -> None:
    assert ranks(_kinds_of_lanes, 4, hosts, timeout_s=60) == [kind] * 4


@pytest.mark.parametrize("check", [_pieces, _sparse])
def test_all_reduces(ranks: Ranks, check: Callable[[int, int], None]) -> None:
    ranks(check, 4, timeout_s=60)


def test_hosts_with_unequal_numbers_of_ranks_are_refused(ranks: Ranks) -> None:
    assert ranks(_refused, 3, timeout_s=60) == ["done"] * 3


def test_a_lane_that_one_rank_cant_open_is_an_error_on_all(ranks: Ranks) -> None:
    found = ranks(_unopened, 4, timeout_s=60)
    assert all("rank 3 can't open lane 0: Too many open files" in t for t in found)


def test_a_late_rank_is_named_on_both_hosts(ranks: Ranks) -> None:
    found = ranks(_late, 4, timeout_s=60)
    assert all("rank 1" in text for text in found), found
