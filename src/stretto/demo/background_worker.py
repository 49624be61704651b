"""One rank of the demo of background jobs, inside the lab.

``python -m stretto.demo.background_worker SCRATCH``. Four arrangements of a foreground
on all hosts and a background job on each host take turns, in several cycles.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from stretto.background.foreground import Foreground
from stretto.demo.background import (
    ALONE,
    BACKGROUND,
    OUTCOME_FILE,
    PARTITION,
    TOGETHER,
    BackgroundOutcome,
    Measured,
)
from stretto.demo.background_job import BATCH, BackgroundJob
from stretto.demo.driver import SETTINGS_FILE
from stretto.demo.settings import DemoSettings
from stretto.demo.worker import SAME_START, Task, Trainee, say
from stretto.runtime import DistributedDataParallel

CYCLES, QUICK_CYCLES = 3, 2
_CYCLES_S = 200.0
"""How long cycles may take together; a busy machine measures fewer."""
_QUICK_STEPS = 6
ALONE_S = 2.0
"""How long the background jobs are measured without a foreground."""

_ALONE_MAX_S = 5 * ALONE_S
"""The same where other work leaves them no processor time."""


class _Foreground:
    """The foreground on some of the hosts."""

    def __init__(self, settings: DemoSettings, hosts: int) -> None:
        self.group = dist.new_group(list(range(hosts)))
        self.batch = settings.batch_per_rank * hosts
        self._trainee: Trainee | None = None
        if dist.get_rank() < hosts:
            task = Task.of(settings, ranks=hosts)
            model = DistributedDataParallel(
                task.model(), process_group=self.group, **SAME_START
            )
            self._trainee = Trainee(task, model)

    def train(self, steps: int) -> float:
        """Return the samples a second of some steps; 0 on other hosts."""
        trainee = self._trainee
        if trainee is None:
            return 0.0
        dist.barrier(self.group)
        begin_s = perf_counter()
        for _ in range(steps):
            trainee.run()
        dist.barrier(self.group)
        return steps * self.batch / (perf_counter() - begin_s)

    @property
    def losses(self) -> list[float]:
        """The losses of all steps on this rank."""
        return [] if self._trainee is None else self._trainee.losses


class _Arrangements:
    """Measures each arrangement once per call."""

    def __init__(self, settings: DemoSettings) -> None:
        self._steps = settings.steps
        self._rank, self._hosts = dist.get_rank(), dist.get_world_size()
        self._device = f"cpu:demo{self._rank}"
        self.whole = _Foreground(settings, self._hosts)
        self.part = _Foreground(settings, self._hosts - 1)
        self.job = BackgroundJob(self._device)

    def alone(self) -> Measured:
        """The foreground on all hosts."""
        return _gathered(self.whole.train(self._steps), 0.0)

    def background(self) -> Measured:
        """The background jobs on all hosts."""
        self.job.run()
        sleep(0.5)
        dist.barrier()
        before = self.job.progress()
        begin_s, found = perf_counter(), Measured(foreground=0.0, background=0.0)
        while not found.background and _agreed(perf_counter() - begin_s < _ALONE_MAX_S):
            sleep(ALONE_S)
            found = _gathered(0.0, _rate(before, self.job.progress()))
        self.job.stop()
        return found

    def partition(self) -> Measured:
        """The foreground on all hosts but the last, which is the background's."""
        is_last = self._rank == self._hosts - 1
        rate, samples = 0.0, 0.0
        dist.barrier()
        if is_last:
            self.job.run()
            before = self.job.progress()
        else:
            samples = self.part.train(self._steps)
        dist.barrier()
        if is_last:
            rate = _rate(before, self.job.progress())
            self.job.stop()
        return _gathered(samples, rate)

    def together(self) -> Measured:
        """The foreground on all hosts, with a background job beside each rank."""
        with Foreground(self._device):
            self.job.run()
            self.whole.train(self._steps // 2)  # lengths and windows are learned
            before = self.job.progress()
            samples = self.whole.train(self._steps)
            rate = _rate(before, self.job.progress())
            self.job.stop()
        return _gathered(samples, rate)


def fits(elapsed_s: float, cycles: int) -> bool:
    """Return whether there is time for another cycle, after some in a time."""
    return not cycles or elapsed_s * (cycles + 1) / cycles <= _CYCLES_S


def _agreed(own: bool) -> bool:  # noqa: FBT001
    """Return rank 0's answer on all ranks."""
    found = torch.tensor([own])
    dist.broadcast(found, 0)
    return bool(found)


def _rate(before: tuple[int, float], after: tuple[int, float]) -> float:
    return BATCH * (after[0] - before[0]) / (after[1] - before[1])


def _gathered(foreground: float, background: float) -> Measured:
    """Return the foreground's samples a second, and the sum of the backgrounds'."""
    mine = torch.tensor([foreground, background], dtype=torch.float64)
    largest, total = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return Measured(foreground=float(largest[0]), background=float(total[1]))


def main() -> None:
    """Run the rank."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    scratch = Path(sys.argv[1])
    settings = DemoSettings.load(scratch / SETTINGS_FILE)
    dist.init_process_group("gloo")
    arrangements = _Arrangements(settings)
    measures: dict[str, Any] = {
        ALONE: arrangements.alone,
        BACKGROUND: arrangements.background,
        PARTITION: arrangements.partition,
        TOGETHER: arrangements.together,
    }
    try:
        arrangements.whole.train(3)
        arrangements.part.train(3)
        count = CYCLES if settings.steps > _QUICK_STEPS else QUICK_CYCLES
        cycles: list[dict[str, Measured]] = []
        begin_s = perf_counter()
        while len(cycles) < count and _agreed(
            fits(perf_counter() - begin_s, len(cycles))
        ):
            say(f"cycle {len(cycles) + 1} of {count}: {', '.join(measures)}")
            cycles.append({name: measure() for name, measure in measures.items()})
    finally:
        arrangements.job.close()
    if dist.get_rank() == 0:
        BackgroundOutcome(
            cycles=cycles,
            isolation=arrangements.job.isolation,
            final_loss=arrangements.whole.losses[-1],
        ).save(scratch / OUTCOME_FILE)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
