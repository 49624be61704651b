"""A device without preemption in virtual time, and two jobs on it.

The device runs what was launched first to its end. The foreground computes and waits in
turn; it launches one computation at a time. The background launches a task whenever the
gate permits it. Events only: no clock, no sleep.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.background.board import COMPUTING, WAITING, Mark
from stretto.background.foreground_view import ForegroundView
from stretto.background.pacing import OPEN, Controller, Gate

if TYPE_CHECKING:
    from stretto.background.paired_steps import StepRecord


@dataclass
class Result:
    steps_s: list[float] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    """Tasks started, by step."""
    reasons: set = field(default_factory=set)


class VirtualDevice:
    """Runs both jobs; `segment_of(step, i)` gives (compute_s, wait_s, kind)."""

    def __init__(
        self,
        segments,
        task_s,
        gate,
        *,
        controller: Controller | None = None,
        slowed=lambda kind: 1.0,
    ):
        self.segments = segments
        self.task_of = task_s if callable(task_s) else lambda n: task_s
        self.gate, self.controller = gate, controller
        self.slowed = slowed
        self.view = ForegroundView(self._step_ended)
        self.numbers = itertools.count(1)
        self.free_s = 0.0
        self.queue: list[float] = []  # ends of the background's launched tasks
        self.launched = 0
        self.known_s: float | None = None
        self.records: list[StepRecord] = []
        self.result = Result()

    def _step_ended(self, record):
        self.records.append(record)
        if self.controller is not None:
            self.controller.add(record)

    def _mark(self, step, time_s, state, kind="other"):
        self.view.add([Mark(next(self.numbers), step, time_s, state, kind)])

    def _launch_until(self, now_s, end_s, *, holds=None):
        """Launch tasks at every moment from now to the end at which the gate opens.

        `holds`: the foreground's computation ends then; launched tasks run behind it.
        """
        time_s = now_s
        while True:
            while self.queue and self.queue[0] <= time_s + 1e-12:
                self.view.task_ended(self.queue.pop(0))
            now = self.view.situation(time_s, len(self.queue))
            reason = self.gate.decide(now, self.known_s)
            self.result.reasons.add(reason)
            if reason in OPEN:
                length_s = self.task_of(self.launched)
                begin_s = max(time_s, self.free_s, holds or 0.0)
                self.free_s = begin_s + length_s
                self.queue.append(self.free_s)
                self.view.task_began(begin_s)
                self.known_s = length_s
                self.launched += 1
                continue
            later = [at for at in self.queue if at > time_s + 1e-12]
            if not later or later[0] >= end_s:
                return
            time_s = later[0]

    def run(self, steps):
        now_s = 0.0
        for step in range(1, steps + 1):
            begin_s, before = now_s, self.launched
            self._mark(step, now_s, COMPUTING)
            for compute_s, wait_s, kind in self.segments(step):
                # What was launched before goes first.
                began_s = max(now_s, self.free_s)
                end_s = began_s + compute_s
                self._launch_until(now_s, began_s)
                # Tasks launched while the foreground computes follow it.
                self.free_s = max(self.free_s, end_s)
                self._launch_until(began_s, end_s, holds=end_s)
                now_s = end_s
                if wait_s:
                    self._mark(step, now_s, WAITING, kind)
                    wait_s *= self.slowed(kind)
                    self._launch_until(now_s, now_s + wait_s)
                    now_s += wait_s
                    self._mark(step, now_s, COMPUTING)
            self.result.steps_s.append(now_s - begin_s)
            self.result.tasks.append(self.launched - before)
        return self.result


def alone_s(segments, step=1):
    return sum(compute_s + wait_s for compute_s, wait_s, _ in segments(step))


def gated(policy, *, depth=1, margin=0.0):
    return Gate(policy=policy, depth=depth, margin=margin)
