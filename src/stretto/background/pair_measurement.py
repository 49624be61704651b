"""Measure a background's cost to its foreground, and its own rate, in the run. Pure.

# Note [What is compared]
The foreground's loss is that of the controller's paired steps. The background's share
is its rate beside the foreground, control steps included, over its rate alone: tasks
per second between two tasks with no foreground on the board. So a background must have
run some tasks before its foreground began, or after it ended.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple, final

from stretto.background.pacing import Policy
from stretto.background.windows import usable_s
from stretto.errors import SpecError
from stretto.schema.collocation import CollocatedPair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.background.pacing import Gate
    from stretto.background.windows import Window

MIN_ALONE = 10
"""Tasks without a foreground from which the rate alone is known."""

MIN_BLOCKS = 4
"""Blocks of steps beside a foreground from which a pair is known."""

_MAX_BLOCKS = 1000


Limits = tuple[Policy, int]
"""A gate's policy and depth."""


class _Block(NamedTuple):
    """Steps with background between two control steps."""

    limits: Limits
    loss: float
    rate: float
    """Tasks per second."""

    base_s: float
    """The foreground's step without background."""


@final
class PairMeasurement:
    """Follows a background's tasks and its foreground's blocks of steps."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._alone_s: list[float] = []
        self._last_alone_s: float | None = None
        self._lengths_s: list[float] = []
        self._tasks = 0
        self._block_begin_s: float | None = None
        self._blocks: list[_Block] = []

    def add_task(
        self, end_s: float, length_s: float, *, has_foreground: bool, depth: int = 1
    ) -> None:
        """Add a task that has ended.

        Args:
            end_s: when it ended.
            length_s: how long it had the device.
            has_foreground: whether one was on the board.
            depth: how many tasks were outstanding with it.
        """
        if has_foreground:
            self._tasks += 1
            self._last_alone_s = None
            return
        if self._last_alone_s is not None and depth == 1:
            self._alone_s.append(end_s - self._last_alone_s)
            self._lengths_s.append(length_s)
        self._last_alone_s = end_s

    def begin_foreground(self) -> None:
        """Forget the blocks of an earlier foreground."""
        self._blocks.clear()
        self._block_begin_s, self._last_alone_s = None, None
        self._tasks = 0

    def end_block(
        self, now_s: float, limits: Limits, loss: float | None, base_s: float
    ) -> None:
        """Add a block of steps that lies between two control steps.

        Args:
            now_s: the present time.
            limits: the gate's policy and depth in the block.
            loss: the block's loss; ``None`` if no block lies before this control step.
            base_s: the foreground's step without background.
        """
        begin_s, self._block_begin_s = self._block_begin_s, now_s
        tasks, self._tasks = self._tasks, 0
        if loss is None or begin_s is None or now_s <= begin_s:
            return
        rate = tasks / (now_s - begin_s)
        self._blocks.append(_Block(limits, loss, rate, base_s))
        del self._blocks[:-_MAX_BLOCKS]

    def pair(
        self,
        *,
        foreground: str,
        background: str,
        device: str,
        gate: Gate,
        windows: Sequence[Window],
    ) -> CollocatedPair:
        """Return what was measured.

        Args:
            foreground: the foreground's name, such as its model.
            background: the background's name.
            device: the kind of device.
            gate: with the policy and depth in force.
            windows: the foreground's windows.

        Raises:
            SpecError: too little was measured, or the foreground has no windows.
        """
        if len(self._alone_s) < MIN_ALONE:
            raise SpecError(
                f"the background ran {len(self._alone_s)} tasks without a foreground, "
                f"and its rate alone needs {MIN_ALONE}: start it before the "
                "foreground, or keep it running afterward"
            )
        limits = gate.policy, gate.depth
        blocks = [block for block in self._blocks if block.limits == limits]
        if len(blocks) < MIN_BLOCKS:
            raise SpecError(
                f"{len(blocks)} blocks of the foreground's steps were compared with "
                f"the last limits, and a pair needs {MIN_BLOCKS}: let both run longer"
            )
        rate = len(self._alone_s) / sum(self._alone_s)
        task_s = statistics.median(self._lengths_s)
        base_s = statistics.median(block.base_s for block in blocks)
        fits = gate.policy is Policy.FITS
        idle_s = usable_s(windows, task_s) if fits else sum(w.length_s for w in windows)
        if not idle_s > 0.0:
            raise SpecError(
                f"no wait of the foreground fits a task of {task_s:.3g} s: divide the "
                "background's work into shorter tasks"
                if fits
                else "the foreground never waited, so a background can use no idle "
                "time: measure beside a foreground that waits"
            )
        losses = [block.loss for block in blocks]
        shares = [block.rate / rate for block in blocks]
        return CollocatedPair(
            foreground=foreground,
            background=background,
            device=device,
            policy=gate.policy.value,
            depth=gate.depth,
            task_s=task_s,
            usable_ratio=min(1.0, idle_s / base_s),
            loss_ratio=statistics.median(losses),
            loss_spread_ratio=_spread(losses),
            share_ratio=statistics.median(shares),
            share_spread_ratio=_spread(shares),
            pairs=len(blocks),
        )


def _spread(values: Sequence[float]) -> float:
    first, _, third = statistics.quantiles(values, n=4)
    return third - first
