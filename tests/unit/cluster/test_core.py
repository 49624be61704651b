"""Single promises of the core: fences, lives, strays, dependencies, profiles."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from stretto.cluster import events as ev
from stretto.cluster.commands import StopPart
from stretto.cluster.decisions import event_of
from stretto.cluster.devices import Device
from stretto.cluster.policies import registry
from stretto.cluster.policies.base import Attach, Detach
from stretto.cluster.queries import job_details
from stretto.cluster.server import Server
from stretto.errors import Infeasible, SpecError, StoreUnavailable
from stretto.schema.job import GangOptions
from support.cluster_world import LIMITS, World


@pytest.fixture
def world():
    return World(registry.get("fifo"), (2, 2))


def state(world, job):
    return world.ledger.job(job).state


def test_a_job_of_a_silent_host_starts_elsewhere_after_the_fence_only(world):
    job = world.submit(minimum=2)
    world.advance(1.0, 1)
    world.advance(1.0, 1)
    first, second = world.hosts
    assert (job, 1) in first.supervisors
    first.fail("cut", 1e9)
    world.advance(6.0, 6)
    assert world.ledger.job(job).attempt == 1  # it continues if the host returns
    world.advance(LIMITS.watchdog_s, 40)
    assert not any(s.lives for s in first.supervisors.values())
    world.advance(LIMITS.margin_s + 2, 10)
    assert (job, 2) in second.supervisors


def test_a_job_that_succeeded_on_a_silent_host_does_not_run_again(world):
    job = world.submit(minimum=4)
    world.advance(2.0, 2)
    first, second = world.hosts
    for host in world.hosts:
        host.fail("cut", world.now_s + LIMITS.watchdog_s + 10)
        host.end((job, 1), 0)
    later = world.submit(minimum=2, after=(job,))
    world.advance(LIMITS.watchdog_s + LIMITS.margin_s + 2, 10)
    assert state(world, job) == "waiting"
    world.restart()
    world.advance(20.0, 20)
    assert state(world, job) == "done"
    assert world.ledger.job(job).attempt == 1
    assert state(world, later) == "running"
    assert not first.outbox
    assert not second.outbox


def test_an_end_by_the_watchdog_uses_no_restart(world):
    """Its host returns before others may start the job."""
    job = world.submit(minimum=2, attempts=0)
    world.advance(2.0, 2)
    world.hosts[0].report(ev.ENDED, job, 1, code=None, signaled=True, why="watchdog")
    world.advance(4.0, 4)
    found = world.ledger.job(job)
    assert (found.state, found.attempt, found.failures) == ("running", 2, 0)


def test_a_late_success_of_one_host_is_not_that_of_a_gang(world):
    job = world.submit(minimum=4)
    world.advance(2.0, 2)
    first, second = world.hosts
    for host in world.hosts:
        host.fail("cut", world.now_s + LIMITS.watchdog_s + 10)
    first.end((job, 1), 0)
    second.end((job, 1), 1)
    world.advance(LIMITS.watchdog_s + 30, 30)
    assert world.ledger.job(job).attempt == 2


def test_a_gang_that_loses_a_host_stops_on_the_others_and_frees_them_at_once(world):
    job = world.submit(minimum=4)
    world.advance(2.0, 2)
    first, second = world.hosts
    second.fail("cut", 1e9)
    world.advance(LIMITS.silent_s + 4.0, 10)
    assert not any(s.lives for s in first.supervisors.values())
    assert world.ledger.cluster.free.num_free() == 2
    assert world.ledger.job(job).attempt == 1  # until the fence of the other host


def test_a_job_survives_the_death_of_an_agent(world):
    job = world.submit(minimum=2)
    world.advance(2.0, 2)
    world.hosts[0].fail("agent", world.now_s + 2)
    world.advance(10.0, 10)
    assert state(world, job) == "running"
    assert world.ledger.job(job).attempt == 1


def test_a_report_of_an_earlier_life_does_not_take_over(world):
    host = world.hosts[0]
    host.start_agent()
    agent, events, _ = host.request()
    host.start_agent()
    world.beat(host)
    world.coordinator.push(host.name, agent, events)
    assert world.ledger.is_current(host.name, f"{host.name}#{host.life}")


def test_devices_of_an_attempt_that_should_not_live_are_not_given(world):
    host = world.hosts[0]
    row = {"job": "gone-9", "attempt": 1, "state": "running", "devices": [0]}
    host.start_agent()
    host.joining = False
    host.report(
        ev.JOINED,
        life=host.life,
        devices=[{"index": 0}, {"index": 1}],
        attempts=[row],
    )
    world.beat(host)
    assert world.ledger.cluster.free.num_free() == 3
    assert [c.attempt for c in world.ledger.commands(host.name)] == [1]


def test_a_duplicate_changes_nothing(world):
    host = world.hosts[0]
    world.submit(minimum=1)
    host.late_s = 1e9
    world.beat(host)
    host.late_s = 0.0
    kept = len(world.store.kept)
    world.deliver(0, again=True)
    after = len(world.store.kept)
    world.deliver(0)
    assert len(world.store.kept) == after >= kept


def test_a_failed_job_starts_again_after_a_backoff_until_none_is_left(world):
    job = world.submit(attempts=1)
    for _ in range(2):
        world.advance(6.0, 6)
        host, supervisor = world.live()[0]
        host.end((supervisor.job, supervisor.attempt), 1)
    world.advance(2.0, 2)
    record = world.ledger.state.records[job]
    assert (record.view.state, record.code) == ("failed", 1)
    assert record.why.startswith("after 1 restart, on h")


def test_a_job_that_ran_and_is_stopped_as_it_waits_was_not_stopped_before(world):
    job = world.submit("background", minimum=4)
    waits = world.submit("background", minimum=4)
    world.advance(2.0, 2)
    world.submit(minimum=4)
    world.advance(4.0, 4)
    for name in (job, waits):
        world.coordinator.stop(name, user="ana")
    records = world.ledger.state.records
    assert records[job].why == "ana stopped it while it waited to start again"
    assert records[waits].why == "ana stopped it before it started"


def test_a_job_that_no_open_host_holds_says_which_are_closed():
    world = World(registry.get("fifo"), (1, 1, 1))
    world.coordinator.drain("h1")
    for host in (world.hosts[0], world.hosts[2]):
        host.fail("cut", 1e9)
    world.advance(8.0, 8)
    assert world.ledger.reason(world.submit(), world.now_s) == (
        "needs 1 device, the open hosts have 0; not heard from: h0, h2, see `stretto "
        "cluster status`; drained: h1"
    )


def test_thousands_of_failures_are_no_end_of_the_coordinator(world):
    job = world.submit(attempts=5000)
    world.advance(6.0, 6)
    world.ledger.state.records[job].view.failures = 2000
    host, supervisor = world.live()[0]
    host.end((supervisor.job, supervisor.attempt), 1)
    world.advance(2.0, 2)
    assert world.ledger.job(job).failures == 2001


def test_ranks_start_although_those_of_the_first_host_have_ended(world):
    # The first host chooses where ranks meet, and a coordinator that was killed has
    # forgotten it.
    world.submit(minimum=4)
    world.advance(2.0, 2)
    first, second = world.hosts
    ((fence, _),) = first.supervisors.items()
    del second.supervisors[fence]
    world.ledger.state.records[fence[0]].live.parts[second.name].is_started = False
    coordinator = object.__new__(Server)
    coordinator.ledger, coordinator._meetings = world.ledger, {}

    def starts():
        coordinator._sent = {second.name: set()}
        wanted = world.ledger.commands(second.name)
        return coordinator._new_commands(second.name, wanted)

    assert starts() == []
    first.end(fence, 0)
    world.beat(first)
    assert len(starts()) == 1


def test_ranks_on_other_hosts_get_a_short_grace_after_a_failure(world):
    world.submit(minimum=4, attempts=1)
    world.advance(6.0, 6)
    first, second = (host for host, _ in world.live())
    ((fence, _),) = first.supervisors.items()
    first.end(fence, 1)
    world.beat(first)
    (stop,) = world.ledger.commands(second.name)
    assert (type(stop), stop.grace_s) == (StopPart, 10.0)


def test_a_job_that_has_ended_does_not_hang(world):
    job = world.submit(minimum=1)
    world.advance(6.0, 6)
    host, supervisor = world.live()[0]
    fence = supervisor.job, supervisor.attempt
    host.report(ev.STEP, *fence, step=7, step_s=0.1, idle_s=9.0)
    world.beat(host)
    assert job_details(world.ledger, job, world.now_s)["progress"]["idle_s"] == 9.0
    host.end(fence, 0)
    world.beat(host)
    assert "idle_s" not in job_details(world.ledger, job, world.now_s)["progress"]


def test_a_restart_waits_and_says_why(world):
    job = world.submit(attempts=1)
    world.advance(2.0, 2)
    host, supervisor = world.live()[0]
    host.end((supervisor.job, supervisor.attempt), 1)
    world.advance(1.0, 1)
    assert "starts again in" in world.ledger.reason(job, world.now_s)


def test_a_job_after_a_stopped_one_fails(world):
    first = world.submit(minimum=1)
    second = world.submit(minimum=1, after=(first,))
    world.coordinator.stop(first)
    world.calm()
    assert state(world, second) == "failed"


def test_a_job_after_an_unknown_one_is_refused(world):
    with pytest.raises(SpecError, match="is unknown"):
        world.submit(after=("nobody",))


def test_a_job_that_never_fits_is_refused_and_recorded(world):
    with pytest.raises(Infeasible, match="needs 5 devices, the cluster has 4"):
        world.submit(minimum=5)
    assert world.store.kept[-1].kind == ev.REFUSED


def test_a_job_that_never_fits_its_part_of_a_partition_is_refused():
    world = World(registry.get("partition"), (2, 2))
    with pytest.raises(Infeasible, match="policy partition gives foregrounds 2 of 4"):
        world.submit(minimum=3)


def test_a_job_without_a_profile_is_profiled_on_one_device(world):
    job = world.submit(minimum=2, burst="unprofiled")
    world.advance(2.0, 2)
    (host, supervisor), *rest = world.live()
    assert (supervisor.purpose, len(supervisor.devices), rest) == ("profile", 1, [])
    host.end((job, 1), 0)
    world.advance(3.0, 3)
    assert state(world, job) == "running"
    assert world.ledger.job(job).speeds is not None


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_foregrounds_profiling_takes_a_device_that_backgrounds_have(name):
    world = World(registry.get(name), (2, 2))
    for _ in range(6):
        world.submit("background", priority=1)
    world.advance(2.0, 2)
    job = world.submit(minimum=2, burst="unprofiled")
    world.advance(4.0, 4)
    purposes = {s.job: (s.purpose, s.role) for _, s in world.live()}
    assert purposes[job] == ("profile", "foreground")
    world.check()


@pytest.mark.parametrize("name", registry.NAMES)
def test_nothing_runs_beside_a_profiling(name):
    world = World(registry.get(name), (1, 1))
    first = world.submit(burst="unprofiled")
    world.submit("background")
    world.submit("background")
    world.advance(2.0, 2)
    used = [(host.name, number) for host, s in world.live() for number in s.devices]
    assert first in {s.job for _, s in world.live()}
    assert len(set(used)) == len(used)


def test_a_profiling_beside_a_foreground_in_an_earlier_store_continues():
    world = World(registry.get("deeppool"), (5,))
    foreground = world.submit(minimum=5, burst="profiled")  # two ranks never compute
    world.advance(4.0, 4)
    job = world.submit(minimum=1, burst="unprofiled")
    placed = {"purpose": "profile", "devices": [["h0", 4]], "method": "strong"}
    ended = {"code": 0, "signaled": False}
    for event in (
        ev.Event(ev.PLACED, 5.0, job, 1, data=placed | {"batch": None}),
        ev.Event(ev.PROFILED, 6.0, job, 1, "h0", {"profile": "/jobs/profile.json"}),
        ev.Event(ev.ENDED, 7.0, job, 1, "h0", ended),
    ):
        world.ledger.apply(event)
    world.advance(1.0, 1)
    assert [s.job for _, s in world.live()] == [foreground]
    assert (state(world, job), world.ledger.job(job).role) == ("waiting", "foreground")


def test_a_drain_for_the_end_is_known_also_in_earlier_stores(world):
    host = world.ledger.cluster.hosts["h0"]
    world.ledger.apply(ev.Event(ev.DRAINED, 0.0, host="h0", data={"by": "down"}))
    assert (host.is_drained, host.is_ending) == (True, True)
    world.coordinator.drain("h0", user="down")  # a user of that name
    assert (host.is_drained, host.is_ending) == (True, False)
    world.coordinator.drain("h0", ends=True)
    assert not host.is_ending
    world.coordinator.open("h0")
    assert (host.is_drained, host.is_ending) == (False, False)


def test_a_drained_host_is_left_and_not_used(world):
    job = world.submit(minimum=2)
    world.advance(2.0, 2)
    world.coordinator.drain("h0")
    world.advance(4.0, 4)
    assert {host.name for host, _ in world.live()} == {"h1"}
    assert world.ledger.job(job).failures == 0


def test_nothing_is_commanded_that_is_not_kept(world):
    world.full_s = 1e9
    world.store.fails = True
    world.coordinator.ledger.submit(  # as if kept before the disk was full
        world.spec(minimum=1), world.now_s
    )
    world.advance(2.0, 2)
    assert not world.live()


def test_what_a_host_lost_while_it_was_down_starts_again(world):
    job = world.submit(minimum=2)
    world.advance(2.0, 2)
    assert state(world, job) == "running"
    world.hosts[0].fail("host", world.now_s + 2)
    world.advance(4.0, 4)
    assert world.ledger.job(job).attempt == 2


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"life": None}, r"\$\.data\.life"),
        ({"devices": [{}]}, r"\$\.data\.devices\[0\]\.index"),
        ({"devices": [{"index": 1}]}, r"\$\.data\.devices"),
        ({"attempts": None}, r"\$\.data\.attempts"),
        ({"attempts": [{"attempt": 1}]}, r"\$\.data\.attempts\[0\]\.job"),
        (
            {"attempts": [{"job": "j", "attempt": 1, "state": "?"}]},
            r"attempts\[0\]\.state",
        ),
        (
            {"attempts": [{"job": "j", "attempt": 1, "state": "running"}]},
            r"attempts\[0\]\.devices",
        ),
        (
            {
                "attempts": [
                    {"job": "j", "attempt": 1, "state": "running", "devices": [2]}
                ]
            },
            r"attempts\[0\]\.devices\[0\]",
        ),
    ],
)
def test_a_damaged_report_is_refused_whole_and_names_the_place(world, change, place):
    host, before = world.hosts[0], len(world.store.kept)
    good = ev.Event(
        ev.JOINED,
        0.0,
        data={"life": 2, "devices": [{"index": 0}, {"index": 1}], "attempts": []},
        agent_seq=1,
    )
    bad = replace(good, data={**good.data, **change}, agent_seq=2)
    with pytest.raises(SpecError, match=place):
        world.coordinator.push(host.name, f"{host.name}#2", [good, bad])
    assert len(world.store.kept) == before
    world.check()


def test_a_request_that_comes_again_makes_no_second_job(world):
    spec = world.spec()
    first = world.coordinator.submit(spec, request="r1")
    world.restart()
    assert world.coordinator.submit(spec, request="r1") == first
    assert world.coordinator.submit(spec, request="r2") != first


def test_a_request_that_could_not_be_kept_may_come_again(world):
    world.store.fails = True
    with pytest.raises(StoreUnavailable):
        world.coordinator.submit(world.spec(), request="r1")
    world.store.fails = False
    assert state(world, world.coordinator.submit(world.spec(), request="r1"))


def test_a_host_that_will_not_return_counts_no_more(world):
    world.ledger.gone = frozenset({"h0"})
    with pytest.raises(Infeasible, match="needs 3 devices, the cluster has 2"):
        world.submit(minimum=3)


@pytest.mark.parametrize("name", ["fifo", "strong", "weak", "batch-optimal"])
def test_a_foreground_waits_behind_no_background_because_the_first_cannot_fit(name):
    world = World(registry.get(name), (4,))
    world.submit(minimum=2)
    world.advance(2.0, 2)
    world.submit("background", minimum=2)
    world.advance(2.0, 2)
    first = world.submit(minimum=4)
    later = world.submit(minimum=2)
    world.advance(6.0, 6)
    assert (state(world, first), state(world, later)) == ("waiting", "running")
    world.check()


def test_a_foreground_that_has_waited_long_is_passed_by_none_also_for_a_background():
    world = World(registry.get("fifo", patience_s=10.0), (4,))
    world.submit(minimum=2)
    world.advance(2.0, 2)
    background = world.submit("background", minimum=2)
    world.submit(minimum=4)
    world.advance(20.0, 20)
    later = world.submit(minimum=2)
    world.advance(6.0, 6)
    assert (state(world, later), state(world, background)) == ("waiting", "running")


def test_two_foregrounds_take_two_backgrounds_devices_at_once():
    world = World(registry.get("fifo"), (2, 2))
    backgrounds = [world.submit("background", minimum=2) for _ in range(2)]
    world.advance(2.0, 2)
    for _ in range(2):
        world.submit(minimum=2)
    world.coordinator.tick()
    assert [state(world, job) for job in backgrounds] == ["stopping", "stopping"]


def deeppool_with_gang(kind, minimum=2, maximum=4):
    world = World(registry.get("deeppool"), (2, 2))
    gang = GangOptions(kind=kind)
    job = world.submit("background", minimum, maximum, gang=gang, attempts=0)
    world.advance(4.0, 4)
    return world, job


@pytest.mark.parametrize(
    ("kind", "minimum", "number"),
    [("claims", 1, 2), ("local-sgd", 2, 2), ("claims", 3, 3), ("none", 2, 4)],
)
def test_a_process_group_gets_more_devices_on_its_own_host_only(kind, minimum, number):
    world, job = deeppool_with_gang(kind, minimum)
    assert len(world.ledger.job(job).devices) == number
    assert world.ledger.job(job).attempt == 1
    world.check()


def grown_across_hosts():
    """Return a world in which an earlier release let a process group grow."""
    world, job = deeppool_with_gang("claims")
    used = world.ledger.job(job).devices[0].host
    other = "h1" if used == "h0" else "h0"
    data = {"devices": [[other, 0], [other, 1]]}
    world.ledger.apply(ev.Event(ev.ATTACHING, world.now_s, job, 1, data=data))
    world.advance(4.0, 4)
    assert len(world.ledger.job(job).devices) == 4
    return world, job


def test_a_process_group_across_hosts_is_stopped_whole_and_for_free():
    world, job = grown_across_hosts()
    world.submit(minimum=2, allow=False)
    world.advance(6.0, 6)
    found = world.ledger.job(job)
    assert (found.state, found.attempt, found.failures) == ("running", 2, 0)
    assert len(found.devices) == 2


def test_no_policy_changes_a_process_group_on_one_of_its_hosts():
    world, job = grown_across_hosts()
    devices = world.ledger.job(job).devices
    with pytest.raises(SpecError, match="process group on several hosts: stop it"):
        event_of(Detach(job, devices[:1]), world.ledger.state, world.now_s)
    world, job = deeppool_with_gang("claims", maximum=3)
    other = {"h0": "h1", "h1": "h0"}[world.ledger.job(job).devices[0].host]
    with pytest.raises(SpecError, match="on its own host only"):
        event_of(Attach(job, (Device(other, 0),)), world.ledger.state, world.now_s)


def test_devices_that_a_background_leaves_are_free_when_it_has_left():
    world = World(registry.get("deeppool"), (3,))
    gang = world.submit("background", 1, 3)
    world.advance(2.0, 2)
    assert len(world.ledger.job(gang).devices) == 3
    world.submit(minimum=1, allow=False)
    world.coordinator.tick()
    assert len(world.ledger.job(gang).devices) == 2
    assert world.ledger.cluster.free.num_free() == 0
    assert not world.ledger.cluster.foreground  # the background has not left yet
    world.advance(3.0, 3)
    world.check()
    assert len(world.ledger.cluster.foreground) == 1


def test_a_part_that_starts_late_counts_the_ranks_of_one_that_has_ended(world):
    job = world.submit(minimum=4)
    first, second = world.hosts
    world.beat(first)
    world.beat(first)
    first.report(ev.ENDED, job, 1, code=0, signaled=False)
    world.beat(first)
    (command,) = world.ledger.commands(second.name)
    assert (command.first_rank, command.ranks) == (2, 4)


@pytest.mark.parametrize("fault", ["silent", "drained"])
def test_no_background_joins_a_foreground_on_a_host_that_takes_nothing_new(fault):
    world = World(registry.get("deeppool"), (5, 1))
    foreground = world.submit(minimum=5, burst="profiled")  # two ranks never compute
    world.advance(4.0, 4)
    world.submit(allow=False)  # on the other host
    world.advance(1.0, 1)
    assert state(world, foreground) == "running"
    if fault == "silent":
        world.hosts[0].fail("cut", world.now_s + 10)
        world.advance(6.0, 6)
    else:
        world.coordinator.drain("h0")
    background = world.submit("background")
    world.advance(1.0, 1)
    assert world.ledger.job(background).devices == ()
    assert world.ledger.refused_decision == ""


def test_a_background_on_a_lost_host_gets_no_more_devices_elsewhere():
    world = World(registry.get("deeppool"), (1, 2))
    foreground = world.submit(allow=False)
    world.advance(2.0, 2)
    gang = GangOptions(kind="none")
    background = world.submit("background", 1, 3, gang=gang)
    world.advance(2.0, 2)
    assert [d.host for d in world.ledger.job(background).devices] == ["h1", "h1"]
    world.hosts[1].fail("cut", world.now_s + 8)
    world.advance(6.0, 6)
    world.coordinator.stop(foreground)
    world.advance(1.0, 2)
    assert len(world.ledger.job(background).devices) == 2
    world.restart()  # decides the same
    world.advance(8.0, 8)
    assert len(world.ledger.job(background).devices) == 3  # it has not been stopped
    assert world.ledger.job(background).attempt == 1


def test_a_reason_counts_one_device_as_one(world):
    world.submit(minimum=4)
    world.advance(1.0, 1)
    job = world.submit(minimum=1)
    assert world.ledger.reason(job, world.now_s) == "needs 1 device, 0 are free"


# devices of different memory


@pytest.mark.parametrize("policy", ["fifo", "partition", "strong", "deeppool"])
def test_a_job_gets_the_devices_that_hold_it_although_more_are_free(policy):
    world = World(registry.get(policy), (2, 2), memory_bytes=(8, 80))
    job = world.submit(minimum=1, maximum=4, memory_bytes=40)
    world.advance(1.0, 1)
    devices = world.ledger.job(job).devices
    assert devices
    assert {device.host for device in devices} == {"h1"}


def test_backgrounds_leave_the_devices_that_a_foreground_fits_on():
    world = World(registry.get("fifo"), (2, 2), memory_bytes=(80, 8))
    background = world.submit("background", minimum=1)  # on h0
    world.submit(minimum=1, memory_bytes=40)
    world.advance(1.0, 1)
    job = world.submit(minimum=1, memory_bytes=40)
    world.advance(4.0, 4)
    assert world.ledger.job(job).devices[0].host == "h0"
    assert world.ledger.job(background).devices[0].host == "h1"


def test_devices_are_kept_for_a_job_that_waits_for_their_memory():
    world = World(registry.get("fifo"), (1, 1), memory_bytes=(80, 8))
    first = world.submit(memory_bytes=40)
    world.advance(1.0, 1)
    job = world.submit(memory_bytes=40)
    world.advance(4000.0, 2000)
    later = world.submit()
    world.advance(1.0, 1)
    assert world.ledger.job(later).devices == ()
    assert world.ledger.reason(job, world.now_s) == (
        "needs 1 device with 40 B, 0 are free"
    )
    world.hosts[0].end((first, 1), 0)
    world.advance(2.0, 2)
    assert world.ledger.job(job).devices
    assert world.ledger.job(later).devices


@pytest.mark.parametrize("policy", ["fifo", "strong", "deeppool"])
def test_no_job_waits_while_devices_that_hold_it_are_free(policy):
    draw = random.Random(7)
    for _ in range(20):
        sizes = [draw.choice((8, 40, 80)) for _ in range(3)]
        world = World(registry.get(policy), (1, 2, 3), memory_bytes=sizes)
        jobs = []
        for _ in range(8):
            minimum, memory = draw.randint(1, 3), draw.choice((0, 8, 40, 80))
            with contextlib.suppress(Infeasible):
                role = draw.choice(("foreground", "background"))
                jobs.append(world.submit(role, minimum, memory_bytes=memory))
            world.advance(1.0, 1)
        world.check()
        free = world.ledger.cluster.free
        for job in (world.ledger.job(name) for name in jobs):
            room = free.num_free(memory_bytes=job.memory_bytes)
            assert job.devices or room < job.minimum
            for device in job.devices:
                assert sizes[int(device.host[1:])] >= job.memory_bytes
