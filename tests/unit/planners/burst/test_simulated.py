"""A burst plan's step on its ranks: closed forms, bounds, and what the loop chooses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from stretto._api import burst
from stretto.cli.burst import command
from stretto.cost.burst import BurstNetwork, ring_of, widths_of
from stretto.cost.collectives import ring_all_reduce_s
from stretto.errors import PlanMismatch, SpecError
from stretto.planners.burst.plan import same_width
from stretto.schema import (
    AllReduceFit,
    Cluster,
    ComputeContention,
    Contention,
    Link,
    RateCurve,
)
from stretto.schema.burst import (
    BatchTime,
    BurstPlan,
    Layer,
    LayerGpus,
    LayerProfile,
)
from stretto.schema.burst_host import HostCosts, Slowdown
from stretto.sim.fair import max_min_rates
from support.burst_graphs import chain_of, random_profile, random_shape

RATE, DELAY_S = 1e8, 1e-4


def cluster(hosts=4, *, per_host=1, **more) -> Cluster:
    return Cluster(
        name="four",
        hosts=hosts,
        ranks_per_host=per_host,
        inter_host=Link(latency_s=DELAY_S, bandwidth_bytes_per_s=RATE),
        intra_host=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10),
        **more,
    )


def layer(name, *inputs, each_s=1e-3, parameters=0, activation=0, update_s=0.0):
    times = tuple(
        BatchTime(samples=n, forward_s=n * each_s / 3, backward_s=n * each_s * 2 / 3)
        for n in (1, 64)
    )
    return Layer(
        name=name,
        inputs=inputs,
        parameter_bytes=parameters,
        activation_bytes=activation,
        times=times,
        update_s=update_s,
    )


def profile(*layers, input_bytes=0) -> LayerProfile:
    return LayerProfile(
        name="made", device="none", layers=layers, input_bytes=input_bytes
    )


def plan(of, gpus, batch, *places) -> BurstPlan:
    return BurstPlan(
        profile_digest=of.digest,
        gpus=gpus,
        batch=batch,
        amplification_limit=None,
        layers=tuple(
            LayerGpus(layer=each.name, gpus=width, first_gpu=first)
            for each, (first, width) in zip(of.layers, places, strict=True)
        ),
    )


def windows_as_rows(windows):
    """Compare equal to rows of begin, length and kind, but for rounding."""
    return [
        (pytest.approx(w.begin_s), pytest.approx(w.length_s), w.kind) for w in windows
    ]


def test_on_one_rank_a_step_is_the_sum_of_all_times():
    some = profile(
        layer("a", update_s=5e-3, parameters=10**9), layer("b", "a", activation=10**9)
    )
    step = burst.simulate(some, plan(some, 1, 8, (0, 1), (0, 1)), cluster())
    assert step.iteration_s == pytest.approx(2 * 8e-3 + 5e-3, rel=1e-9)
    assert step.computing_s == (pytest.approx(step.iteration_s),)
    assert step.idle_s == (pytest.approx(0.0, abs=1e-12),)


def test_what_lies_outside_layers_is_paid_by_every_rank_once():
    bare = profile(layer("a"), layer("b", "a"))
    some = replace(bare, outside_s=7e-3)
    places = ((0, 2), (0, 2))
    without = burst.simulate(bare, plan(bare, 2, 8, *places), cluster())
    step = burst.simulate(some, plan(some, 2, 8, *places), cluster())
    assert step.iteration_s == pytest.approx(without.iteration_s + 7e-3)
    for ours, theirs in zip(step.computing_s, without.computing_s, strict=True):
        assert ours == pytest.approx(theirs + 7e-3)


@pytest.mark.parametrize("size", [10**5, 10**8])
def test_one_layers_data_parallel_step_ends_with_its_all_reduce(size):
    some = profile(layer("a", parameters=size))
    step = burst.simulate(some, plan(some, 4, 8, (0, 4)), cluster())
    sync_s = ring_all_reduce_s(size, 4, cluster().inter_host)
    counts_s = DELAY_S
    assert step.iteration_s == pytest.approx(counts_s + 2e-3 + sync_s, rel=1e-9)
    assert step.idle_s == tuple(pytest.approx(counts_s + sync_s) for _ in range(4))
    wanted = [
        (0.0, counts_s, "redistribution"),
        (counts_s + 2e-3, sync_s, "synchronization"),
    ]
    assert [windows_as_rows(windows) for windows in step.windows] == [wanted] * 4


def test_synchronization_overlaps_the_backward_of_earlier_layers():
    size = 6 * 10**5  # 2 * 3/4 of it: 9 ms; the backward of a: 4/3 of 32 ms
    some = profile(layer("a", each_s=16e-3), layer("b", "a", parameters=size))
    step = burst.simulate(
        some, plan(some, 4, 8, (0, 4), (0, 4)), cluster(), bucket_bytes=1
    )
    alone = replace(some, layers=(some.layers[0], layer("b", "a")))
    quiet = burst.simulate(alone, plan(alone, 4, 8, (0, 4), (0, 4)), cluster())
    assert step.iteration_s == pytest.approx(quiet.iteration_s, rel=1e-9)


def test_samples_gathered_on_one_rank_take_what_its_link_takes():
    some = profile(
        layer("a", each_s=1e-4, activation=10**5), layer("b", "a", each_s=1e-4)
    )
    step = burst.simulate(some, plan(some, 4, 8, (0, 4), (0, 1)), cluster())
    # Six of eight samples come in over one link, and their gradients go back; what b
    # gives has no bytes, so its way back and forth costs a latency each.
    move_s = DELAY_S + 6 * 10**5 / RATE
    expected_s = DELAY_S + 2e-4 + 2 * move_s + 8e-4 + 2 * DELAY_S
    # Rank 0 computes a's backward while the gradients are on their way; the others' is
    # after, and the last.
    assert step.iteration_s == pytest.approx(expected_s, rel=1e-6)
    assert step.computing_s[0] == pytest.approx(1e-3)
    assert step.computing_s[1] == pytest.approx(2e-4)
    # Rank 0 waits for the counts, six samples, its output's gradient, the last gradient
    # of a; the others compute a's forward between two waits, and its backward at last.
    forward_s, begin_s = 2e-4 / 3, DELAY_S + 2e-4 / 3
    output_s = begin_s + move_s + 8e-4 / 3
    last_s = step.iteration_s - 2 * forward_s
    assert windows_as_rows(step.windows[0]) == [
        (0.0, DELAY_S, "redistribution"),
        (begin_s, move_s, "redistribution"),
        (output_s, 2 * DELAY_S, "redistribution"),
        (step.iteration_s - move_s, move_s, "redistribution"),
    ]
    for windows in step.windows[1:]:
        assert windows_as_rows(windows) == [
            (0.0, DELAY_S, "redistribution"),
            (begin_s, last_s - begin_s, "redistribution"),
        ]


def test_calls_and_copies_count_where_they_were_measured():
    host = HostCosts(
        message_s=1e-4,
        message_s_per_byte=1e-9,
        copy_s_per_byte=2e-9,
        exchange_s=5e-3,
    )
    size = 10**6
    wide = replace(profile(layer("a", parameters=size)), host=host)
    step = burst.simulate(wide, plan(wide, 4, 8, (0, 4)), cluster())
    sync_s = ring_all_reduce_s(size, 4, cluster().inter_host)
    computing_s = 2e-3 + 2 * 2e-9 * size
    assert step.iteration_s == pytest.approx(5e-3 + computing_s + sync_s, rel=1e-9)
    assert step.computing_s == (pytest.approx(computing_s),) * 4

    some = profile(
        layer("a", each_s=1e-4, activation=10**5), layer("b", "a", each_s=1e-4)
    )
    some = replace(some, host=host)
    step = burst.simulate(some, plan(some, 4, 8, (0, 4), (0, 1)), cluster())
    # Two samples to rank 0 and their gradients back; its output, and that's gradient.
    calls_s = 2 * (1e-4 + 1e-9 * 2 * 10**5) + 2 * 1e-4
    assert step.computing_s[1] == pytest.approx(2e-4 + calls_s)
    assert step.computing_s[0] == pytest.approx(1e-3 + 3 * calls_s)
    with pytest.raises(SpecError, match="message_s must be >= 0"):
        replace(host, message_s=-1.0)


def test_what_runs_behind_communication_slows_those_who_share_processors():
    # a's gradients, 1.5e8 bytes on the wire, 1.5 s; beside them b's backward, 4 s.
    some = profile(layer("b", each_s=3.0), layer("a", "b", parameters=10**8))
    places = plan(some, 4, 8, (0, 4), (0, 4))
    host = HostCosts(
        message_s=0.0,
        message_s_per_byte=0.0,
        copy_s_per_byte=0.0,
        exchange_s=0.0,
        connection_s_per_byte=2.5e-9,
    )
    shared = replace(some, host=host)
    free = burst.simulate(shared, places, cluster(), bucket_bytes=1)
    alone = burst.simulate(shared, places, cluster(), bucket_bytes=1, cores=8)
    assert alone.iteration_s == pytest.approx(free.iteration_s)
    # Four ranks send and receive 1e8 bytes a second each: 2 processors of 4.
    tight = burst.simulate(shared, places, cluster(), bucket_bytes=1, cores=4)
    slower_s = (1.5 + 6 * DELAY_S) * (1 - 4 / 6)
    assert tight.computing_s[0] - free.computing_s[0] == pytest.approx(
        slower_s, rel=1e-2
    )


def test_measured_slowdowns_go_before_processors_that_are_shared():
    host = HostCosts(
        message_s=0.0,
        message_s_per_byte=0.0,
        copy_s_per_byte=0.0,
        exchange_s=0.0,
        slowdowns=(Slowdown(ranks=2, ratio=1.2), Slowdown(ranks=4, ratio=2.4)),
    )
    # One alone, between, and beyond what was measured.
    wanted = {0.5: 1.0, 1: 1.0, 1.5: 1.1, 2: 1.2, 3: 1.8, 4: 2.4, 5: 3.0}
    for ranks, ratio in wanted.items():
        assert host.slowdown(ranks) == pytest.approx(ratio)
    assert replace(host, slowdowns=()).slowdown(7) == 1.0
    some = replace(profile(layer("a")), host=host)
    for width, ratio in ((1, 1.0), (2, 1.2), (4, 2.4)):
        places = plan(some, 4, 8, (0, width))
        step = burst.simulate(some, places, cluster(), cores=2)
        assert step.computing_s[0] == pytest.approx(ratio * 8e-3 / width)
    with pytest.raises(SpecError, match="ranks must ascend, got 2 after 4"):
        replace(host, slowdowns=host.slowdowns[::-1])


def test_branches_on_ranks_of_their_own_run_at_the_same_time():
    some = profile(
        layer("a", each_s=1e-6),
        layer("b", "a", each_s=1e-2),
        layer("c", "a", each_s=1e-2),
        layer("d", "b", "c", each_s=1e-6),
    )
    turns = burst.simulate(some, plan(some, 2, 4, *[(0, 1)] * 4), cluster())
    places = ((0, 1), (0, 1), (1, 1), (0, 1))
    beside = burst.simulate(some, plan(some, 2, 4, *places), cluster())
    assert turns.iteration_s == pytest.approx(80e-3, rel=0.02)
    assert beside.iteration_s == pytest.approx(40e-3, rel=0.05)


def test_shared_processors_and_contention_slow_what_runs_together():
    some = profile(layer("a"))
    quick = burst.simulate(some, plan(some, 4, 8, (0, 4)), cluster())
    slow = burst.simulate(some, plan(some, 4, 8, (0, 4)), cluster(), cores=2)
    assert slow.iteration_s - quick.iteration_s == pytest.approx(2e-3)
    alone = burst.simulate(some, plan(some, 4, 8, (0, 1)), cluster(), cores=2)
    assert alone.computing_s[0] == pytest.approx(8e-3)
    curve = RateCurve(gamma1=RATE, gamma2=0.0, gamma3=0.0, gamma4=0.0)
    contended = cluster(
        contention=Contention(
            compute=ComputeContention(alpha1=1.0, alpha2=0.5),
            overlapped=curve,
            exclusive=curve,
            resources=(1,),
        )
    )
    two = profile(layer("a"), layer("b", "a", parameters=10**8))
    places = plan(two, 4, 8, (0, 4), (0, 4))
    free = burst.simulate(two, places, cluster(), bucket_bytes=1)
    busy = burst.simulate(two, places, contended, bucket_bytes=1)
    # a's backward, 4/3 ms, runs beside b's gradients and so at half the rate
    assert busy.computing_s[0] - free.computing_s[0] == pytest.approx(4e-3 / 3)


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_between_its_bounds(seed):
    rng = random.Random(seed)
    gpus, batch = rng.choice([(2, 5), (3, 7), (4, 8), (4, 9)])
    some = random_profile(rng, random_shape(rng, 2), batch)
    places = []
    for _ in some.layers:
        width = rng.randint(1, gpus)
        places.append((rng.randint(0, gpus - width), width))
    chosen = plan(some, gpus, batch, *places)
    step = burst.simulate(some, chosen, cluster())
    assert step == burst.simulate(some, chosen, cluster())
    busy = [0.0] * gpus
    for each, (first, width) in zip(some.layers, places, strict=True):
        for i in range(width):
            busy[first + i] += each.compute_s(max(1, -(-(batch - i) // width)))
    assert step.computing_s == tuple(pytest.approx(s, rel=1e-9) for s in busy)
    assert step.iteration_s >= max(busy)
    for computing_s, idle_s in zip(step.computing_s, step.idle_s, strict=True):
        assert computing_s + idle_s == pytest.approx(step.iteration_s)
    for windows, idle_s in zip(step.windows, step.idle_s, strict=True):
        assert sum(w.length_s for w in windows) == pytest.approx(idle_s, abs=1e-12)
    spans = step.timeline.spans
    assert max(span.end_s for span in spans) == pytest.approx(step.iteration_s)
    for rank in range(gpus):
        own = sorted((s.start_s, s.end_s) for s in spans if s.track == f"rank{rank}")
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(own))
    faster = replace(
        cluster(), inter_host=Link(latency_s=0.0, bandwidth_bytes_per_s=1e15)
    )
    assert burst.simulate(some, chosen, faster).iteration_s <= step.iteration_s + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_the_chosen_plan_is_no_slower_than_any_of_one_width(seed):
    rng = random.Random(seed)
    some = random_profile(rng, chain_of(4), 8)
    problem = burst.problem(some, gpus=4, batch=8, cluster=cluster())
    chosen, step = burst.plan_on(problem, cluster())
    again = burst.simulate(some, chosen, cluster())
    assert again.iteration_s == step.iteration_s == chosen.predicted.iteration_s
    for width in problem.widths:
        alone = burst.simulate(some, same_width(problem, width), cluster())
        near_s = alone.iteration_s * (1 + burst.NEAR_RATIO + 1e-12)
        assert step.iteration_s <= near_s
    assert chosen.predicted.single_width_s * 1.021 >= step.iteration_s
    assert chosen.predicted.idle_gpu_s == pytest.approx(sum(step.idle_s))
    chosen.check_matches(some)


def test_a_limit_is_kept_on_a_cluster_too():
    some = random_profile(random.Random(2), chain_of(4), 8)
    problem = burst.problem(
        some, gpus=4, batch=8, cluster=cluster(), amplification_limit=1.3
    )
    chosen, _ = burst.plan_on(problem, cluster())
    assert chosen.predicted.max_amplification <= 1.3 * (1 + 1e-9)


def test_plans_and_clusters_that_do_not_fit_are_refused():
    some = profile(layer("a"))
    chosen = plan(some, 4, 8, (0, 4))
    with pytest.raises(SpecError, match="needs 4 ranks, but 'four' has 2"):
        burst.simulate(some, chosen, cluster(2))
    with pytest.raises(PlanMismatch, match="Run `stretto burst plan` again"):
        burst.simulate(profile(layer("b")), chosen, cluster())


@pytest.mark.parametrize("limit", [0.5, 0.999, float("nan"), float("inf")])
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(SpecError, match="must be finite and >= 1"):
        burst.problem(profile(layer("a")), gpus=2, batch=2, amplification_limit=limit)


def test_widths_as_numbers_are_at_most_the_gpus_and_find_samples():
    assert widths_of((4, 1), 8, 4) == (1, 4)
    assert widths_of((1, 2), 3, 8) == (1, 2)
    with pytest.raises(SpecError, match="from 1 to 8, the number of GPUs, got 9"):
        widths_of((1, 9), 8, 16)
    with pytest.raises(SpecError, match="<= 4, the batch, got 8"):
        widths_of((8,), 8, 4)
    with pytest.raises(SpecError, match="must name"):
        widths_of((), 8, 4)


# prices


def test_a_measured_all_reduce_prices_synchronization():
    fit = AllReduceFit(startup_s=6e-3, s_per_byte=3e-8, ranks=4)
    fitted = cluster(allreduce=fit)
    network = BurstNetwork.of(fitted, 4)
    assert network.sync_s(10**6, 4) == pytest.approx(6e-3 + 3e-2)
    assert network.sync_s(10**6, 2) == pytest.approx(2e-3 + 2e-2)
    assert ring_of(fitted).wire_bytes_per_s == pytest.approx(5e7)
    half = replace(network, exposed_ratio=0.5)
    assert half.sync_s(10**6, 4) == pytest.approx(18e-3)
    with pytest.raises(SpecError, match="exposed_ratio must be 0 to 1"):
        replace(network, exposed_ratio=1.5)
    some = profile(layer("a", parameters=10**6))
    step = burst.simulate(some, plan(some, 4, 8, (0, 4)), fitted)
    assert step.idle_s[0] == pytest.approx(1e-3 + 36e-3)


@pytest.mark.parametrize("seed", range(30))
def test_rates_are_max_min_fair(seed):
    rng = random.Random(seed)
    capacities = [rng.uniform(1, 10) for _ in range(4)]
    links = [
        tuple(rng.sample(range(4), rng.randint(0, 3))) for _ in range(rng.randint(1, 7))
    ]
    caps = [rng.choice([0.5, 3.0, 100.0]) for _ in links]
    rates = max_min_rates(caps, links, capacities)
    loads = [
        sum(r for r, some in zip(rates, links, strict=True) if k in some)
        for k in range(4)
    ]
    assert all(a <= b * (1 + 1e-6) for a, b in zip(loads, capacities, strict=True))
    for rate, some, cap in zip(rates, links, caps, strict=True):
        # It has its cap, or a full link on which no flow has more.
        assert rate >= cap * (1 - 1e-6) or any(
            loads[k] >= capacities[k] * (1 - 1e-6)
            and all(
                r <= rate * (1 + 1e-6)
                for r, other in zip(rates, links, strict=True)
                if k in other
            )
            for k in some
        )


def test_the_command_plans_for_a_cluster_and_prints_idle_time(tmp_path):
    some = profile(
        layer("a", activation=10), layer("b", "a", parameters=10**8, each_s=1e-5)
    )
    some.save(tmp_path / "p.json")
    cluster().save(tmp_path / "c.json")
    args = ["plan", f"{tmp_path}/p.json", "--gpus", "4", "--batch", "8", "--cluster"]
    done = CliRunner().invoke(command, [*args, f"{tmp_path}/c.json"])
    assert done.exit_code == 0, done.output
    assert "idle by rank" in done.output
    assert "times as fast as data parallelism" in done.output
    widths = [int(line.split()[0]) for line in done.output.splitlines()[:2]]
    assert widths == [4, 1]  # what weighs much and computes little is on one rank


def test_idle_time_of_the_published_model_is_what_no_layer_uses():
    some = profile(
        layer("a", activation=0, each_s=1e-2),
        layer("b", "a", parameters=10**9, each_s=1e-6),
    )
    problem = burst.problem(some, gpus=4, batch=8)
    chosen = burst.plan(problem)
    assert [entry.gpus for entry in chosen.layers] == [4, 1]
    predicted = chosen.predicted
    busy_s = 4 * problem.node_s[0, 2] + problem.node_s[1, 0]
    assert predicted.idle_gpu_s == pytest.approx(4 * predicted.iteration_s - busy_s)
    assert predicted.idle_gpu_s > 0


def test_batch_norms_cost_their_rounds_on_several_gpus():
    plain = profile(layer("a"))
    some = profile(replace(plain.layers[0], norms=2))
    assert some.digest == plain.digest
    places = plan(plain, 4, 8, (0, 4))
    slower_s = 2 * (1 + 2) * 3 * DELAY_S
    one, two = (burst.simulate(each, places, cluster()) for each in (plain, some))
    assert two.iteration_s - one.iteration_s == pytest.approx(slower_s)
    network = BurstNetwork.of(cluster(), 4)
    assert network.norm_s(2, 4) == pytest.approx(slower_s)
    assert network.norm_s(2, 1) == 0.0
    problem = burst.problem(some, gpus=4, batch=8, cluster=cluster())
    without = burst.problem(plain, gpus=4, batch=8, cluster=cluster())
    gap_s = problem.node_s - without.node_s
    assert gap_s.tolist() == [pytest.approx([0.0, slower_s / 3, slower_s])]
