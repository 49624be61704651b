from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.cost import cluster_at
from stretto.errors import SpecError
from stretto.schema import AllReduceFit, Cluster, Concurrency, Link


def cluster(**changes):
    values = {
        "name": "c",
        "hosts": 8,
        "ranks_per_host": 1,
        "inter_host": Link(latency_s=1e-5, bandwidth_bytes_per_s=6.25e9),
        "intra_host": Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11),
    }
    return Cluster(**{**values, **changes})


def test_on_one_host_the_networks_fit_does_not_count():
    on = cluster(
        ranks_per_host=4,
        allreduce=AllReduceFit(startup_s=1.0, s_per_byte=1e-6, ranks=32),
        concurrency=Concurrency(gamma=(1.0, 2.0)),
    )
    within = cluster_at(on, 4)
    assert (within.hosts, within.ranks_per_host) == (1, 4)
    assert within.allreduce is within.concurrency is None
    assert cluster_at(on, 2).ranks == 2
    across = cluster_at(on, 8)
    assert across == replace(on, hosts=2)


def test_ranks_that_do_not_fill_hosts_are_named():
    with pytest.raises(SpecError, match="whole hosts of 4, or a part of one; got 6"):
        cluster_at(cluster(ranks_per_host=4), 6)
    with pytest.raises(SpecError, match="got 0"):
        cluster_at(cluster(), 0)
