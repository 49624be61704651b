"""Tables of speeds, from which the simulator and `deeppool` choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.cluster.speeds import SpeedQuestion, speeds
from stretto.cluster.views import BURST, DATA_PARALLEL
from stretto.cost.burst import BurstNetwork
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.simulated import plan_on
from stretto.schema.efficiency import SampleEfficiency
from stretto.zoo import cluster, layer_profile

LIMIT = 2.0
BATCH = 16


@pytest.fixture
def question() -> SpeedQuestion:
    return SpeedQuestion(
        profile=layer_profile("wide-resnet101-2"),
        network=cluster("deeppool"),
        batch=BATCH,
        gpus=(1, 4, 8),
        methods=(BURST, DATA_PARALLEL),
        efficiency=SampleEfficiency(name="assumed", critical_batch=1024.0),
        amplification_limit=LIMIT,
    )


def test_a_burst_plan_is_as_fast_as_where_one_is_made_for_the_cluster(
    question, tmp_path
):
    network = cluster("deeppool")
    problem = BurstProblem.of(
        question.profile,
        BurstNetwork.of(network, 8),
        gpus=8,
        batch=BATCH,
        amplification_limit=LIMIT,
    )
    step = plan_on(problem, network)[1]
    rows = {row.gpus: row for row in speeds(question, folder=tmp_path).methods[BURST]}
    assert rows[8].step_s == pytest.approx(step.iteration_s)


def test_a_fit_between_hosts_does_not_count_on_one_host(question, tmp_path):
    hosts = replace(question.network, hosts=2, ranks_per_host=4)
    far = speeds(replace(question, network=hosts), folder=tmp_path)
    none = replace(question.network, allreduce=None)
    assert far == speeds(replace(question, network=none), folder=tmp_path)


def test_a_kept_table_is_read_again(question, tmp_path):
    first = speeds(question, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert speeds(question, folder=tmp_path) == first
