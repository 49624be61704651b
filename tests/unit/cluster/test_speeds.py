"""Tables of speeds, from which the simulator and `deeppool` choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.cluster import speeds as module
from stretto.cluster.speeds import SpeedQuestion, speeds
from stretto.cluster.views import BATCH_OPTIMAL, BURST, DATA_PARALLEL
from stretto.cost.burst import BurstNetwork
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.simulated import plan_on
from stretto.schema.efficiency import SampleEfficiency
from stretto.zoo import cluster, layer_profile
from stretto.zoo.profiles import SAMPLES

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


def batch_optimal(question, gpus):
    samples = (*SAMPLES, 512, 1024, 2048)
    profile = layer_profile("vgg16", samples=samples)
    return replace(question, profile=profile, gpus=gpus, methods=(BATCH_OPTIMAL,))


@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_batch_optimal_is_the_best_of_all_batches(question, tmp_path, gpus):
    asked = batch_optimal(question, (gpus,))
    seconds = {}
    for batch in (BATCH * 2**i for i in range(8)):  # to what one device can run
        some = replace(asked, batch=batch, methods=(DATA_PARALLEL,))
        row = speeds(some, folder=tmp_path).methods[DATA_PARALLEL][0]
        needed = asked.efficiency.samples_to_target(batch)
        seconds[batch] = needed / batch * row.step_s
    (found,) = speeds(asked, folder=tmp_path).methods[BATCH_OPTIMAL]
    needed = asked.efficiency.samples_to_target(found.batch)
    assert needed / found.batch * found.step_s == pytest.approx(min(seconds.values()))


def test_batches_that_cannot_be_the_best_are_not_simulated(
    question, tmp_path, monkeypatch
):
    batches = []
    simulate = module.simulate

    def counted(profile, plan, network):
        batches.append(plan.batch)
        return simulate(profile, plan, network)

    monkeypatch.setattr(module, "simulate", counted)
    speeds(batch_optimal(question, (8,)), folder=tmp_path)
    # Of eleven on 8 devices; the first is that of one device alone.
    assert len(batches) <= 5
