"""Hosts, agents, supervisors and a network that fail as they like, in virtual time.

They follow the note "What agents must do" of `stretto.cluster.ledger`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.cluster import events as ev
from stretto.cluster.commands import StartPart, StopPart, UseDevices
from stretto.cluster.coordinator import Coordinator
from stretto.cluster.ledger import Ledger, Limits
from stretto.cluster.tables import all_rows
from stretto.cluster.views import METHODS, Speed, Speeds
from stretto.errors import StoreUnavailable
from stretto.schema.job import (
    BackgroundRules,
    BurstOptions,
    GpuRange,
    Job,
    RestartRules,
)

LIMITS = Limits(silent_s=4.0, watchdog_s=20.0, margin_s=3.0)


SPEEDS = Speeds(
    methods={
        method: tuple(
            Speed(
                gpus=gpus,
                batch=8 * gpus if method == "weak" else 8,
                step_s=0.1 / gpus,
                speedup=float(gpus),
                idle_ratios=(0.1, 0.3, 0.5, 1.0, 1.0)[:gpus],
                background=(0.1, 0.2, 0.4, 1.0, 1.0)[:gpus],
                loss=0.01,
            )
            for gpus in range(1, 6)
        )
        for method in METHODS
    }
)
"""Speeds by which the last ranks of a large job are never used."""


class MemoryStore:
    """A store that can fail, and holds what was kept."""

    def __init__(self):
        self.kept = []
        self.fails = False

    def events(self):
        return iter(list(self.kept))

    def last_steps(self):
        steps = {event.job: event for event in self.kept if event.kind == ev.STEP}
        return iter(steps.values())

    def append(self, events, state):
        if self.fails:
            raise StoreUnavailable("the disk is full")
        known = {(e.agent, e.agent_seq) for e in self.kept if e.agent}
        self.kept += [e for e in events if (e.agent, e.agent_seq) not in known]
        state.dirty.clear()


@dataclass
class Supervisor:
    job: str
    attempt: int
    role: str
    devices: tuple[int, ...]
    purpose: str
    lives: bool = True
    code: int | None = None
    signaled: bool = False

    def row(self):
        row = {"job": self.job, "attempt": self.attempt, "devices": list(self.devices)}
        if self.lives:
            return row | {"state": "running"}
        return row | {
            "state": "ended",
            "code": self.code,
            "signaled": self.signaled,
        }


@dataclass
class Host:
    """A host with its agent; ``life`` is None while the agent is down."""

    name: str
    devices: int
    now: object
    memory_bytes: int = 0
    life: int = 0
    is_up: bool = True
    agent_up: bool = True
    down_s: float = 0.0
    """When its agent, or all of it, works again."""
    cut_s: float = 0.0
    """Until when no request reaches the coordinator."""
    deaf_s: float = 0.0
    """Until when no answer reaches it."""
    late_s: float = 0.0
    """Until when its requests arrive late."""
    seq: int = 0
    outbox: list = field(default_factory=list)
    supervisors: dict = field(default_factory=dict)
    contact_s: float = -1e9
    joining: bool = True
    """It must report `JOINED` next."""

    def start_agent(self):
        self.life += 1
        self.agent_up, self.joining = True, True
        self.seq, self.outbox = 0, []

    def fail(self, kind, until_s):
        """Let its agent or all of it die, or its network fail, for a while."""
        if kind in ("cut", "deaf", "late"):
            setattr(self, f"{kind}_s", until_s)
        elif self.agent_up or kind == "host":
            self.agent_up, self.down_s = False, until_s
            if kind == "host":
                self.is_up = False
                self.supervisors.clear()

    def recover(self):
        """Start the agent again when it is time."""
        if not self.agent_up and self.now() >= self.down_s:
            self.is_up = True
            self.start_agent()

    def report(self, kind, job="", attempt=0, **data):
        self.seq += 1
        self.outbox.append(ev.Event(kind, 0.0, job, attempt, "", data, "", self.seq))

    def request(self):
        """Return what the agent sends now."""
        if self.joining:
            self.joining = False
            rows = [s.row() for s in self.supervisors.values()]
            size = self.memory_bytes
            devices = [{"index": i, "memory_bytes": size} for i in range(self.devices)]
            self.report(ev.JOINED, life=self.life, devices=devices, attempts=rows)
        return (f"{self.name}#{self.life}", list(self.outbox), self.now())

    def answered(self, answer, sent_s):
        """Do what an answer to the last request says."""
        if self.now() - sent_s >= LIMITS.watchdog_s:
            return
        acknowledged = {e.agent_seq: e for e in self.outbox}
        for seq, event in acknowledged.items():
            if seq <= answer.acknowledged and event.kind == ev.ENDED:
                self.supervisors.pop((event.job, event.attempt), None)
        self.outbox = [e for e in self.outbox if e.agent_seq > answer.acknowledged]
        if answer.join:
            self.joining = not any(e.kind == ev.JOINED for e in self.outbox)
            return
        self.contact_s = sent_s
        for command in answer.commands:
            self.execute(command)

    def execute(self, command):
        key = (command.job, command.attempt)
        known = self.supervisors.get(key)
        match command:
            case StartPart():
                if known is None:
                    later = [a for j, a in self.supervisors if j == command.job]
                    assert all(a < command.attempt for a in later)
                    self.supervisors[key] = Supervisor(
                        *key, command.spec.role, command.devices, command.purpose
                    )
                    self.report(ev.STARTED, *key, devices=list(command.devices))
            case StopPart():
                if known is None:
                    if not any(
                        e.kind == ev.ENDED and (e.job, e.attempt) == key
                        for e in self.outbox
                    ):
                        self.report(ev.ENDED, *key, code=None, why="never started")
                elif known.lives:
                    self.end(key, 143, signaled=True)
            case UseDevices():
                if known is not None and known.lives:
                    fewer = set(known.devices) - set(command.devices)
                    known.devices = command.devices
                    kind = ev.DETACHED if fewer else ev.ATTACHED
                    self.report(kind, *key, devices=list(command.devices))

    def end(self, key, code, *, signaled=False):
        known = self.supervisors[key]
        known.lives, known.code, known.signaled = False, code, signaled
        if self.agent_up:
            if known.purpose == "profile" and code == 0:
                self.report(ev.PROFILED, *key, profile="/jobs/profile.json")
            self.report(ev.ENDED, *key, code=code, signaled=signaled)

    def expire(self):
        """End what has had no contact for the watchdog's time."""
        if self.now() - self.contact_s >= LIMITS.watchdog_s:
            for key, known in list(self.supervisors.items()):
                if known.lives:
                    self.end(key, 137, signaled=True)


class World:
    """A coordinator, its store and hosts."""

    def __init__(self, policy, sizes=(2, 2), store=None, memory_bytes=()):
        self.now_s = 0.0
        self.policy = policy
        self.speeds = SPEEDS
        self.store = MemoryStore() if store is None else store
        sizes = zip(sizes, memory_bytes or (0,) * len(sizes), strict=True)
        self.hosts = [
            Host(f"h{i}", n, lambda: self.now_s, size)
            for i, (n, size) in enumerate(sizes)
        ]
        self.delayed = []
        self.full_s = 0.0
        """Until when the store is full."""
        self.coordinator = self.started()
        for host in self.hosts:
            host.start_agent()
            self.beat(host)

    def started(self):
        ledger = Ledger(self.policy, LIMITS)
        return Coordinator(ledger, self.store, lambda: self.now_s)

    @property
    def ledger(self):
        return self.coordinator.ledger

    def submit(self, role="foreground", minimum=1, maximum=None, **fields):
        return self.coordinator.submit(self.spec(role, minimum, maximum, **fields))

    def spec(self, role="foreground", minimum=1, maximum=None, **fields):
        if burst := fields.pop("burst", ""):
            profile = None if burst == "unprofiled" else "/jobs/profile.json"
            fields["burst"] = BurstOptions(factory="train.py:make", profile=profile)
        restart = RestartRules(attempts=fields.pop("attempts", 1), backoff_s=5.0)
        allow = fields.pop("allow", True)
        return Job(
            name="j",
            role=role,
            command=("train.py",),
            directory="/jobs",
            gpus=GpuRange(minimum=minimum, maximum=maximum or minimum),
            restart=restart,
            background=BackgroundRules(allow=allow),
            **fields,
        )

    # The network.

    def beat(self, host):
        """Let an agent send a request, and get its answer unless it is lost."""
        if not host.agent_up:
            return
        agent, events, sent_s = host.request()
        if self.now_s < host.late_s:
            self.delayed.append((host.name, agent, events))
        elif self.now_s >= host.cut_s:
            answer = self.coordinator.push(host.name, agent, events)
            if self.now_s >= host.deaf_s:
                host.answered(answer, sent_s)

    def deliver(self, index, *, again=False):
        """Deliver a delayed request; its answer comes too late."""
        name, agent, events = self.delayed[index]
        if not again:
            del self.delayed[index]
        self.coordinator.push(name, agent, events)

    def advance(self, seconds, beats=4):
        """Let time pass; agents send requests, watchdogs fire before others look."""
        for _ in range(beats):
            self.now_s += seconds / beats
            for host in self.hosts:
                if host.is_up:
                    host.expire()
            self.store.fails = self.now_s < self.full_s
            self.coordinator.tick()
            for plan in self.coordinator.plans_to_make():
                self.coordinator.planned(plan.job, self.speeds, why="")
            for host in self.hosts:
                host.recover()
                self.beat(host)
            self.check_attempts()
            self.check_devices()

    def restart(self):
        """Kill the coordinator, and start another on its store."""
        before, heard = self.ledger, dict(self.ledger._heard)
        unkept = bool(self.coordinator._unkept)
        self.coordinator = self.started()
        if not unkept:
            assert all_rows(self.ledger.state) == all_rows(before.state)
            self.ledger._heard = heard
            events = before.decide(self.now_s)
            assert self.ledger.decide(self.now_s) == events
            self.coordinator._keep(events)
        self.coordinator.tick()

    # What must always hold.

    def check(self):
        self.check_attempts()
        self.check_devices()
        self.check_jobs()
        self.check_fold()
        assert self.ledger.refused_decision == ""

    def live(self):
        return [
            (host, s)
            for host in self.hosts
            if host.is_up
            for s in host.supervisors.values()
            if s.lives
        ]

    def check_attempts(self):
        attempts = {}
        for _, s in self.live():
            attempts.setdefault(s.job, set()).add(s.attempt)
        assert all(len(numbers) == 1 for numbers in attempts.values()), attempts

    def check_devices(self):
        taken = set()
        for host, s in self.live():
            for device in s.devices:
                key = (host.name, device, s.role)
                assert key not in taken, key
                taken.add(key)

    def check_jobs(self):
        for job, record in self.ledger.state.records.items():
            ended = record.view.state in ev.ENDS
            runs = record.live is not None
            reason = self.ledger.reason(job, self.now_s)
            assert ended or runs or reason, job
            assert not (ended and runs)
        ended = {
            job
            for job, record in self.ledger.state.records.items()
            if record.view.state in ev.ENDS
        }
        assert not ended & {s.job for _, s in self.live()}

    def check_fold(self):
        ledger = Ledger(self.policy, LIMITS)
        for event in [*self.store.events(), *self.coordinator._unkept]:
            ledger.apply(event)
        assert all_rows(ledger.state) == all_rows(self.ledger.state)

    def calm(self, rounds=60):
        """Repair everything and let all ranks end with success."""
        self.full_s = 0.0
        for host in self.hosts:
            host.down_s = host.cut_s = host.deaf_s = host.late_s = 0.0
        self.advance(1.0, 1)
        for host in self.hosts:
            if self.ledger.cluster.hosts[host.name].is_drained:
                self.coordinator.open(host.name)
        for _ in range(rounds):
            self.advance(2.0, 2)
            self.check()
            for host in self.hosts:
                for key, s in host.supervisors.items():
                    if s.lives:
                        host.end(key, 0)
            for host in self.hosts:
                self.beat(host)
            if all(
                record.view.state in ev.ENDS
                for record in self.ledger.state.records.values()
            ):
                break
