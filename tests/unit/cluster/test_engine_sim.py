"""The simulator against closed forms, conservation, and small cases by hand."""

from __future__ import annotations

import heapq
import math
import random
import statistics

import pytest

from stretto.cluster.engine_sim import SimulatedJob, simulate
from stretto.cluster.policies import registry
from stretto.cluster.views import METHODS, Speed, Speeds
from stretto.schema.job import BACKGROUND, FOREGROUND, GpuRange, Job


def spec(role=FOREGROUND, minimum=1, maximum=None, priority=0):
    return Job(
        name="t",
        role=role,
        command=("t.py",),
        directory="/t",
        gpus=GpuRange(minimum=minimum, maximum=maximum or minimum),
        priority=priority,
    )


def job(at, work, role=FOREGROUND, gpus=1, maximum=None, speeds=None, priority=0):
    return SimulatedJob(
        spec=spec(role, gpus, maximum, priority),
        submit_s=float(at),
        work_s=float(work),
        speeds=speeds,
    )


def table(gpus, speedup, idle, background=(), loss=0.0):
    row = Speed(
        gpus=gpus,
        batch=8,
        step_s=1.0,
        speedup=speedup,
        idle_ratios=idle,
        background=background,
        loss=loss,
    )
    return Speeds(methods=dict.fromkeys(METHODS, (row,)))


def run(jobs, policy="fifo", gpus=2, **options):
    return simulate(jobs, registry.get(policy, **options), gpus=gpus)


def ends(found):
    return [one.end_s for one in found.jobs]


def test_one_server_in_order_of_arrival():
    draw = random.Random(1)
    at, jobs, expected, free_s = 0.0, [], [], 0.0
    one = spec()
    for _ in range(200):
        at += draw.expovariate(1.0)
        work = draw.expovariate(1.0)
        jobs.append(SimulatedJob(spec=one, submit_s=at, work_s=work))
        free_s = max(free_s, at) + work
        expected.append(free_s)
    assert ends(run(jobs, gpus=1)) == pytest.approx(expected)


SERVERS, LOAD = 4, 0.7


def arrivals(number):
    draw = random.Random(2)
    at = 0.0
    for _ in range(number):
        at += draw.expovariate(SERVERS * LOAD)
        yield at, draw.expovariate(1.0)


def waits_of(given):
    """The recursion of Kiefer and Wolfowitz: each job takes the server free first."""
    free = [0.0] * SERVERS
    for at, work in given:
        start = max(at, heapq.heappop(free))
        heapq.heappush(free, start + work)
        yield start - at


def test_many_servers_in_order_of_arrival():
    given = list(arrivals(600))
    one = spec()
    jobs = [SimulatedJob(spec=one, submit_s=at, work_s=work) for at, work in given]
    found = [each.waited_s for each in run(jobs, gpus=SERVERS).jobs]
    assert found == pytest.approx(list(waits_of(given)), abs=1e-9)


def test_waits_of_many_servers_are_those_of_erlang():
    offered = SERVERS * LOAD
    last = offered**SERVERS / math.factorial(SERVERS) / (1 - LOAD)
    others = sum(offered**k / math.factorial(k) for k in range(SERVERS))
    expected = last / (others + last) / (SERVERS * (1 - LOAD))
    assert statistics.fmean(waits_of(arrivals(150_000))) == pytest.approx(
        expected, rel=0.05
    )


@pytest.mark.parametrize("policy", registry.NAMES)
def test_devices_times_time_are_the_work_done(policy):
    draw = random.Random(3)
    jobs = [
        job(
            10 * i,
            draw.uniform(5, 200),
            draw.choice([FOREGROUND, BACKGROUND]),
            draw.choice([1, 1, 2, 3]),
        )
        for i in range(60)
    ]
    found = run(jobs, policy, gpus=8)
    for one in found.jobs:
        assert one.end_s is not None
        assert one.held_s + one.beside_s == pytest.approx(one.work_s)
    assert sum(one.held_s for one in found.jobs) <= 8 * found.end_s + 1e-6


def test_fifo_lets_small_jobs_pass_a_gang_only_until_it_has_waited():
    jobs = [job(0, 10), job(1, 20, gpus=2), *(job(2 + i, 10) for i in range(3))]
    passed = run(jobs, patience_s=1e9)
    assert ends(passed) == [10, 32, 12, 20, 22]
    kept = run(jobs, patience_s=0.0)
    assert ends(kept)[:2] == [10, 20]


@pytest.mark.parametrize("policy", registry.NAMES)
@pytest.mark.parametrize("role", [FOREGROUND, BACKGROUND])
def test_no_device_is_kept_for_a_job_that_needs_more_than_there_are(policy, role):
    found = run([job(0, 10, role, gpus=5), job(1, 10, role)], policy, 4, patience_s=0.0)
    assert ends(found) == [None, 11]


def test_fifo_stops_backgrounds_that_started_last_for_a_foreground():
    jobs = [
        job(0, 100, BACKGROUND),
        job(1, 100, BACKGROUND),
        job(10, 50),
    ]
    found = run(jobs)
    assert [one.preemptions for one in found.jobs] == [0, 1, 0]
    assert ends(found) == [100, 151, 60]


def test_priority_comes_before_time():
    jobs = [job(0, 10), job(1, 10), job(2, 10, priority=1)]
    assert ends(run(jobs, gpus=1)) == [10, 30, 20]


def test_partition_gives_each_role_its_part():
    jobs = [*(job(i, 10) for i in range(3)), job(0, 10, BACKGROUND)]
    jobs.sort(key=lambda one: one.submit_s)
    found = run(jobs, "partition", gpus=2, foreground_ratio=0.5)
    by_role = {one.role: one.end_s for one in found.jobs}
    assert by_role == {FOREGROUND: 30, BACKGROUND: 10}


def test_strong_takes_the_fewest_devices_near_the_best():
    rows = tuple(
        Speed(gpus=gpus, batch=8, step_s=1.0, speedup=speedup)
        for gpus, speedup in ((1, 1.0), (2, 1.9), (4, 1.91))
    )
    speeds = Speeds(methods=dict.fromkeys(METHODS, rows))
    jobs = [job(0, 19, gpus=1, maximum=4, speeds=speeds) for _ in range(2)]
    assert ends(run(jobs, "strong", gpus=4)) == pytest.approx([10, 10])


def test_strong_starts_a_job_again_on_more_devices_when_they_are_free():
    rows = tuple(
        Speed(gpus=gpus, batch=8, step_s=1.0, speedup=float(gpus)) for gpus in (1, 2)
    )
    speeds = Speeds(methods=dict.fromkeys(METHODS, rows))
    jobs = [job(0, 50), job(1, 300, gpus=1, maximum=2, speeds=speeds)]
    found = run(jobs, "strong", gpus=2, settle_s=60.0)
    assert ends(found)[1] == pytest.approx(61 + 240 / 2)


def test_deeppool_gives_unused_ranks_back_whole():
    speeds = table(4, 2.0, (0.1, 0.2, 1.0, 1.0))
    jobs = [
        job(0, 200, gpus=4, speeds=speeds),
        *(job(1, 50, BACKGROUND) for _ in range(3)),
    ]
    found = run(jobs, "deeppool", gpus=4)
    assert ends(found) == pytest.approx([100, 51, 51, 101])


def test_deeppool_puts_backgrounds_where_ranks_are_idle_longest_but_not_on_rank_0():
    speeds = table(
        4, 2.0, (0.9, 0.1, 0.5, 0.4), background=(0.8, 0.1, 0.5, 0.4), loss=0.02
    )
    jobs = [
        job(0, 196, gpus=4, speeds=speeds),
        job(0, 20, BACKGROUND),
        job(0, 20, BACKGROUND),
    ]
    found = run(jobs, "deeppool", gpus=4)
    assert ends(found)[1:] == pytest.approx([40, 50])
    # 2 * 0.98 while a background is beside it, then 2.
    assert ends(found)[0] == pytest.approx(50 + (196 - 50 * 1.96) / 2)


def test_deeppool_puts_a_gang_on_the_upper_ranks_of_one_foreground():
    speeds = table(4, 4.0, (0.1,) * 4, background=(0.1, 0.2, 0.5, 0.5))
    jobs = [job(0, 400, gpus=4, speeds=speeds), job(0, 50, BACKGROUND, gpus=2)]
    assert ends(run(jobs, "deeppool", gpus=4)) == pytest.approx([100, 50])


def test_deeppool_takes_nothing_that_was_not_measured():
    speeds = table(2, 2.0, (0.5, 0.5))
    jobs = [job(0, 100, gpus=2, speeds=speeds), job(0, 10, BACKGROUND)]
    assert ends(run(jobs, "deeppool")) == pytest.approx([50, 60])


def test_the_same_jobs_give_the_same_result():
    draw = random.Random(5)
    jobs = [job(i, draw.uniform(1, 50), gpus=draw.choice([1, 2])) for i in range(50)]
    assert ends(run(jobs, gpus=4)) == ends(run(jobs, gpus=4))


def test_a_job_that_can_never_start_does_not_keep_the_simulation_going():
    found = run([job(0, 10, gpus=2)], "partition", foreground_ratio=0.5)
    assert found.jobs[0].end_s is None
