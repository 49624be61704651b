"""The core under random deaths, duplicates, delays, partitions and restarts.

`STRETTO_MACHINE_RUNS=10000` runs that many programs instead of the few of CI.
"""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stretto.cluster import events as ev
from stretto.cluster.policies import registry
from stretto.errors import Infeasible, StoreUnavailable
from support.cluster_world import World

RUNS = int(os.environ.get("STRETTO_MACHINE_RUNS", "40"))
SIZES = st.sampled_from([(1,), (2, 2), (1, 3), (4, 2, 1)])
HOST = st.integers(0, 2)
SECONDS = st.sampled_from([1.0, 3.0, 6.0, 25.0, 60.0])
JOB = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["foreground", "background"]),
        "minimum": st.sampled_from([1, 1, 1, 2, 2, 3, 5]),
        "more": st.integers(0, 2),
        "attempts": st.integers(0, 1),
        "allow": st.booleans(),
        "priority": st.integers(0, 1),
        "after": st.sampled_from([False, False, True]),
        "burst": st.sampled_from(["", "", "profiled", "unprofiled"]),
    }
)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = None

    @initialize(
        policy=st.sampled_from(registry.NAMES),
        sizes=SIZES,
        jobs=st.lists(JOB, min_size=2, max_size=4),
    )
    def begin(self, policy, sizes, jobs):
        self.world = World(registry.get(policy), sizes)
        for job in jobs:
            self.submit(job)
        self.world.advance(1.0, 1)

    def submit(self, job):
        records = self.world.ledger.state.records
        fields = dict(job)
        after = (next(iter(records)),) if fields.pop("after") and records else ()
        if job["role"] == "background":
            fields["burst"] = ""
        fields["maximum"] = job["minimum"] + fields.pop("more")
        try:
            self.world.submit(**fields, after=after)
        except Infeasible:
            devices = sum(host.devices for host in self.world.hosts)
            assert job["minimum"] > self.world.policy.limit(job["role"], devices)
        except StoreUnavailable:
            assert self.world.store.fails

    def then(self, seconds=1.0, beats=1):
        self.world.advance(seconds, beats)

    @rule(job=JOB)
    def another_job(self, job):
        self.submit(job)
        self.then()

    @rule(number=st.integers(0, 9), pause=st.booleans())
    def stop(self, number, pause):
        jobs = list(self.world.ledger.state.records)
        if jobs and pause:
            with contextlib.suppress(StoreUnavailable):
                self.world.coordinator.stop(jobs[number % len(jobs)])
        self.then()

    @rule(number=HOST, opens=st.booleans())
    def drain(self, number, opens):
        host = self.world.hosts[number % len(self.world.hosts)]
        if host.name in self.world.ledger.cluster.hosts:
            coordinator = self.world.coordinator
            with contextlib.suppress(StoreUnavailable):
                (coordinator.open if opens else coordinator.drain)(host.name)
        self.then()

    @rule(
        number=HOST,
        kind=st.sampled_from(["agent", "host", "cut", "deaf", "late"]),
        seconds=st.sampled_from([2.0, 6.0, 22.0, 40.0]),
        then=SECONDS,
    )
    def fault(self, number, kind, seconds, then):
        host = self.world.hosts[number % len(self.world.hosts)]
        host.fail(kind, self.world.now_s + seconds)
        self.then(then, 4)

    @precondition(lambda self: self.world.delayed)
    @rule(number=st.integers(0, 9), again=st.booleans())
    def deliver(self, number, again):
        self.world.deliver(number % len(self.world.delayed), again=again)
        self.then()

    @precondition(lambda self: self.world.live())
    @rule(pick=st.integers(0, 9), code=st.sampled_from([0, 0, 0, 1]))
    def ranks_end(self, pick, code):
        live = self.world.live()
        host, supervisor = live[pick % len(live)]
        host.end((supervisor.job, supervisor.attempt), code)
        self.then()

    @rule(seconds=SECONDS)
    def coordinator_restarts(self, seconds):
        self.world.restart()
        self.then(seconds, 4)

    @rule(seconds=SECONDS)
    def store_is_full(self, seconds):
        self.world.full_s = self.world.now_s + seconds
        self.then()

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        self.then(seconds, 4)

    @rule()
    def plans_are_unknown(self):
        self.world.speeds = None

    @invariant()
    def holds(self):
        if self.world is not None:
            self.world.check()

    def teardown(self):
        if self.world is None:
            return
        self.world.calm()
        for job, record in self.world.ledger.state.records.items():
            reason = self.world.ledger.reason(job, self.world.now_s)
            ends = record.view.state in ev.ENDS or record.blocked_by
            assert ends, (job, reason)


@pytest.mark.timeout(120 + 2 * RUNS)
def test_the_core_survives_everything_in_any_order():
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
