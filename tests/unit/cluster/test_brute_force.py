"""The simulator under `fifo` and `partition` against a second, plain implementation.

It follows the guide's words alone, on one host, in steps from event to event; every
decision looks at all jobs again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from stretto.cluster.engine_sim import SimulatedJob, simulate
from stretto.cluster.policies import registry
from stretto.schema.job import BACKGROUND, FOREGROUND, ROLES, GpuRange, Job


@dataclass
class Row:
    number: int
    submit_s: float
    role: str
    minimum: int
    maximum: int
    priority: int
    left_s: float
    ready_s: float = 0.0
    devices: int = 0
    first_s: float | None = None
    end_s: float | None = None
    preemptions: int = 0

    @property
    def key(self):
        return (-self.priority, self.submit_s, self.number)


@dataclass
class Plain:
    """Jobs on the devices of one host."""

    gpus: int
    patience_s: float
    ratio: float | None
    """The foregrounds' part under `partition`; ``None``: `fifo`."""

    now_s: float = 0.0
    waiting: list = field(default_factory=list)
    live: list = field(default_factory=list)
    """In the order of their starts."""

    def part(self, role):
        if self.ratio is None:
            return self.gpus
        foreground = round(self.gpus * self.ratio)
        return foreground if role == FOREGROUND else self.gpus - foreground

    def room(self, role):
        if self.ratio is None:
            return self.gpus - sum(row.devices for row in self.live)
        taken = sum(row.devices for row in self.live if row.role == role)
        return self.part(role) - taken

    def keeps(self, row):
        fits = row.minimum <= self.part(row.role)
        return fits and self.now_s - row.ready_s >= self.patience_s

    def starts(self, role):
        """Start jobs in their turn; of jobs of one size the first may keep devices."""
        passed = set()
        for row in sorted((r for r in self.waiting if r.role == role), key=_key):
            if row.minimum <= self.room(role):
                row.devices = min(row.maximum, self.room(role))
                self.waiting.remove(row)
                self.live.append(row)
                row.first_s = self.now_s if row.first_s is None else row.first_s
            elif row.minimum not in passed and self.keeps(row):
                return
            else:
                passed.add(row.minimum)

    def decide(self):
        if self.ratio is not None:
            self.starts(FOREGROUND)
            self.starts(BACKGROUND)
            return
        while self.stops():
            pass
        first = min(
            (r for r in self.waiting if r.role == FOREGROUND), key=_key, default=0
        )
        if not first or not self.keeps(first):
            self.starts(BACKGROUND)

    def stops(self):
        """Start foregrounds that fit, and stop backgrounds for the others in turn.

        Returns whether any stopped.
        """
        backgrounds = [row for row in self.live if row.role == BACKGROUND]
        empty, passed, stopped = self.room(FOREGROUND), set(), False
        lent = sum(row.devices for row in backgrounds)
        gained = 0
        for row in sorted((r for r in self.waiting if r.role == FOREGROUND), key=_key):
            if row.minimum <= empty:
                row.devices = min(row.maximum, empty)
                empty -= row.devices
                self.waiting.remove(row)
                self.live.append(row)
                row.first_s = self.now_s if row.first_s is None else row.first_s
            elif row.minimum <= empty + lent:
                missing, empty, stopped = row.minimum - empty, 0, True
                lent -= missing
                while gained < missing:
                    one = backgrounds.pop()
                    gained += one.devices
                    one.devices, one.ready_s = 0, self.now_s
                    one.preemptions += 1
                    self.live.remove(one)
                    self.waiting.append(one)
                gained -= missing
            elif row.minimum not in passed and self.keeps(row):
                break
            else:
                passed.add(row.minimum)
        return stopped

    def run(self, rows):
        coming = list(rows)
        while coming or self.live:
            ends = [self.now_s + row.left_s / row.devices for row in self.live]
            then_s = min(ends + [row.submit_s for row in coming[:1]])
            for row in self.live:
                row.left_s -= row.devices * (then_s - self.now_s)
            self.now_s = then_s
            for row in [row for row in self.live if row.left_s < 1e-7]:
                self.live.remove(row)
                row.devices, row.end_s = 0, then_s
            while coming and coming[0].submit_s <= then_s:
                coming[0].ready_s = then_s
                self.waiting.append(coming.pop(0))
            self.decide()


def _key(row):
    return row.key


def drawn(draw, gpus):
    at, rows = 0.0, []
    for number in range(draw.randint(1, 10)):
        at += draw.uniform(0.5, 4.0)
        minimum = draw.randint(1, gpus)
        maximum = minimum + draw.choice((0, 0, 1, 3))
        priority, work_s = draw.choice((0, 0, 5)), draw.uniform(1.0, 60.0)
        role = draw.choice(ROLES)
        rows.append(Row(number, at, role, minimum, maximum, priority, work_s))
    return rows


def job_of(row):
    spec = Job(
        name="t",
        role=row.role,
        command=("t.py",),
        directory="/t",
        gpus=GpuRange(minimum=row.minimum, maximum=row.maximum),
        priority=row.priority,
    )
    return SimulatedJob(spec=spec, submit_s=row.submit_s, work_s=row.left_s)


@pytest.mark.parametrize("policy", ["fifo", "strong", "weak", "batch-optimal"])
def test_backgrounds_change_no_foregrounds_times_where_stopping_takes_none(policy):
    for seed in range(60):
        draw = random.Random(seed)
        gpus, patience_s = draw.randint(2, 8), draw.choice((0.0, 5.0, 20.0, 3600.0))
        rows = drawn(draw, gpus) + drawn(draw, gpus)
        for number, row in enumerate(rows):
            row.number, row.maximum = number, row.minimum
        rows.sort(key=lambda row: row.submit_s)
        alone = [row for row in rows if row.role == FOREGROUND]
        times = []
        for some in (rows, alone):
            jobs = [job_of(row) for row in some]
            one = registry.get(policy, patience_s=patience_s)
            found = simulate(jobs, one, gpus=gpus, gpus_per_host=4).jobs
            times.append([job.end_s for job in found if job.role == FOREGROUND])
        assert times[0] == pytest.approx(times[1], abs=1e-4), seed


@pytest.mark.parametrize("ratio", [None, 0.3, 0.5])
def test_starts_ends_and_preemptions_are_those_of_a_plain_implementation(ratio):
    for seed in range(60):
        draw = random.Random(seed)
        gpus, patience_s = draw.randint(1, 6), draw.choice((0.0, 5.0, 20.0, 3600.0))
        rows = drawn(draw, gpus)
        if ratio is None:
            policy = registry.get("fifo", patience_s=patience_s)
        else:
            options = {"foreground_ratio": ratio, "patience_s": patience_s}
            policy = registry.get("partition", **options)
        jobs = [job_of(row) for row in rows]
        found = simulate(jobs, policy, gpus=gpus, gpus_per_host=gpus)
        Plain(gpus, patience_s, ratio).run(rows)
        for row, one in zip(rows, found.jobs, strict=True):
            assert one.first_s == pytest.approx(row.first_s, abs=1e-4), seed
            assert one.end_s == pytest.approx(row.end_s, abs=1e-4), seed
            assert one.preemptions == row.preemptions, seed
