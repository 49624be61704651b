"""Contention on real lanes: the loop, the agreement of ranks, the connections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.measure import AbstractContentionBench, CollectiveBench, read_contention
from stretto.measure.load import convolutions
from stretto.runtime.lanes import LanePool, ResourceLaunch
from stretto.runtime.store import ranks_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class Sending(AbstractContentionBench):
    """A bench of real lanes that keeps what a message took, and fits none of it.

    On a machine that tests share, times of messages need not grow with their size.
    """

    wire_factor = None

    def __init__(self, bench: CollectiveBench) -> None:
        self.compute_s = bench.compute_s  # type: ignore[method-assign]
        self.send_s = bench.send_s  # type: ignore[method-assign]
        self.agree = bench.agree  # type: ignore[method-assign]
        self.slowest = bench.slowest  # type: ignore[method-assign]
        self.provenance = bench.provenance  # type: ignore[method-assign]

    def compute_s(self, resource: int | None) -> float:
        raise NotImplementedError

    send_s = agree = slowest = provenance = compute_s  # type: ignore[assignment]


def rank_reads(rank: int, size: int) -> dict[str, Any]:
    ranks = ranks_of(dist.group.WORLD, timeout_s=30.0)
    device = torch.device("cpu")
    pool = LanePool(ranks, serial=77, backend="gloo", device=device)
    bench = CollectiveBench(
        launch_of=lambda resource: ResourceLaunch(pool, resource, cut=True),
        load=convolutions(device),
    )
    readings = read_contention(
        Sending(bench), resources=(1, 3), repetitions=3, budget_s=0.0
    )
    sent_s = [
        bench.send_s(resource, 1 << 20, beside=beside)
        for resource in (1, 3)
        for beside in (False, True)
    ]
    # What a launch of resource 3 carries is the whole message, once.
    message = torch.arange(10.0)
    for work in ResourceLaunch(pool, 3, cut=True)(message):
        work.wait()
    decided = (bench.agree(float(rank + 5)), bench.slowest([float(rank), -rank]))
    pool.close()
    return {
        "readings": readings,
        "sent_s": sent_s,
        "sum": message.tolist(),
        "decided": decided,
        "factor": bench.wire_factor,
    }


def test_ranks_read_the_same_contention_on_real_connections(ranks: Any) -> None:
    first, second = ranks(rank_reads, 2, timeout_s=100.0)
    assert first["readings"] == second["readings"]
    found = first["readings"]
    assert [reading.resource for reading in found.slowdowns] == [1, 3]
    for reading in found.slowdowns:
        assert reading.repetitions == 3
        assert min(reading.compute_overlapped_s, reading.compute_alone_s) > 0
    assert found.provenance["ranks"] == 2
    for each in (first, second):
        assert min(each["sent_s"]) > 0
        assert each["sum"] == [2.0 * v for v in range(10)]
        assert each["decided"] == (5.0, [1.0, 0.0])
        assert each["factor"] == 1.0
