"""The core under random deaths, duplicates, delays, partitions and restarts.

`STRETTO_MACHINE_RUNS=10000` runs that many programs instead of the few of CI.
"""

from __future__ import annotations

import os

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


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = None

    @initialize(policy=st.sampled_from(registry.NAMES), sizes=SIZES)
    def begin(self, policy, sizes):
        self.world = World(registry.get(policy), sizes)

    def host(self, number):
        return self.world.hosts[number % len(self.world.hosts)]

    @rule(
        role=st.sampled_from(["foreground", "background"]),
        least=st.integers(1, 5),
        more=st.integers(0, 2),
        attempts=st.integers(0, 1),
        allow=st.booleans(),
        priority=st.integers(0, 1),
        after=st.booleans(),
        burst=st.sampled_from(["", "", "profiled", "unprofiled"]),
    )
    def submit(self, role, least, more, attempts, allow, priority, after, burst):
        records = self.world.ledger.state.records
        try:
            self.world.submit(
                role,
                least,
                least + more,
                attempts=attempts,
                allow=allow,
                priority=priority,
                after=(next(iter(records)),) if after and records else (),
                burst=burst if role == "foreground" else "",
            )
        except Infeasible:
            assert least > sum(host.devices for host in self.world.hosts)
        except StoreUnavailable:
            assert self.world.store.fails

    @precondition(lambda self: self.world.ledger.state.records)
    @rule(number=st.integers(0, 9))
    def stop(self, number):
        jobs = list(self.world.ledger.state.records)
        self.world.coordinator.stop(jobs[number % len(jobs)])

    @rule(number=HOST, opens=st.booleans())
    def drain(self, number, opens):
        coordinator = self.world.coordinator
        change = coordinator.open if opens else coordinator.drain
        change(self.host(number).name)

    @rule(
        number=HOST,
        fate=st.sampled_from(["ok", "ok", "ok", "lost_request", "lost_answer", "late"]),
    )
    def beat(self, number, fate):
        fates = {} if fate == "ok" else {fate: True}
        self.world.beat(self.host(number), **fates)

    @rule()
    def beat_all(self):
        for host in self.world.hosts:
            self.world.beat(host)

    @precondition(lambda self: self.world.delayed)
    @rule(number=st.integers(0, 9), again=st.booleans())
    def deliver(self, number, again):
        self.world.deliver(number % len(self.world.delayed), again=again)

    @rule(number=HOST, pick=st.integers(0, 9), code=st.sampled_from([0, 0, 1]))
    def ranks_end(self, number, pick, code):
        host = self.host(number)
        keys = [key for key, s in host.supervisors.items() if s.lives]
        if host.is_up and keys:
            host.end(keys[pick % len(keys)], code)

    @rule(number=HOST)
    def agent_dies(self, number):
        host = self.host(number)
        if host.is_up:
            host.agent_up = False

    @rule(number=HOST)
    def agent_starts(self, number):
        host = self.host(number)
        if host.is_up:
            host.start_agent()

    @rule(number=HOST)
    def host_dies(self, number):
        self.host(number).die()

    @rule(number=HOST)
    def host_returns(self, number):
        host = self.host(number)
        if not host.is_up:
            host.is_up = True
            host.start_agent()

    @rule(number=HOST)
    def partition(self, number):
        host = self.host(number)
        host.reachable = not host.reachable

    @rule()
    def coordinator_restarts(self):
        self.world.restart()

    @rule(fails=st.booleans())
    def store(self, fails):
        self.world.store.fails = fails

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0, 21.0, 60.0]))
    def advance(self, seconds):
        self.world.advance(seconds)

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
            too_large = "foregrounds have" in reason or "backgrounds have" in reason
            waits = record.blocked_by or too_large
            assert record.view.state in ev.ENDS or waits, (job, reason)


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
