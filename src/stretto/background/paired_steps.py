"""Compare a foreground's steps with a background and without. Pure.

# Note [Paired steps]
Control steps run without background. A block is the steps with background between two
control steps. Every step of a block is compared with both control steps, as the
logarithm of the ratio of their durations. The loss is the median of these over several
blocks: drift cancels, because control steps lie on both sides, and the median is right
for any distribution of the foreground's own steps, long ones now and then included,
because a difference of two draws from one distribution has the median 0.

A background that loads data between its tasks asks for a lease now and then, and so
more often in long steps than in short ones. Then steps in which a task ran would be
longer than others even if it cost nothing. So only a control step counts in which the
background asked for a lease.

# Note [Which steps are control steps]
A foreground's steps may follow a pattern: two batch sizes in turn, a regularization in
every fourth step. If control steps came at equal distances, they could all be of one
kind. So their positions are drawn from the step's number: one in each group of four,
and for each longer period one of every two of those of half the period. Ranks of one
job count the same steps, so they agree on them without communication.

# Note [Patterns of steps]
Draws make a comparison right on average, but a pattern is noise in it. So a period is
looked for: one at which steps differ much less from those a period ago than neighbors
do. Then each step is compared relative to the usual step at its place in the pattern,
which is known from the steps with background alone.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORTEST_PERIOD = 4
"""Steps of which one is a control step, at least; longer periods are twice another."""

MAX_BLOCKS = 32
"""Last blocks that are kept."""

_MIN_STEPS = 2
"""With background in a block; with fewer, the block continues after its control."""

_MAX_CONTROLS = 8
"""Control steps of one block."""

_RECENT = 128
"""Last steps with background from which a pattern is known."""

_LONGEST_PATTERN = 32
_REPEATS = 3
"""Repeats of a pattern before it is used."""

_LOOK_EVERY = 16
"""Steps with background between two looks for a pattern."""

_CLEARER = 0.4
"""Mean difference at a pattern's period over that of neighbors, at most."""

_SIMILAR = 1.2
"""Ratio of two periods' differences up to which the shorter period is used."""

_MEDIAN_COST = math.pi / 2.0
"""Variance of a median over that of a mean."""

_DRIFT_STEPS = 8
_DRIFT_ERRORS = 4.0

_MASK = 2**64 - 1


def _draw(number: int, salt: int) -> int:
    """Return the same well-mixed bits for the same numbers (splitmix64)."""
    bits = (number * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03 + 1) & _MASK
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return bits ^ bits >> 31


def is_control_step(number: int, period: int) -> bool:
    """Return whether a step is a control step where one in ``period`` is.

    Those of a period are also control steps of every shorter one.

    Args:
        number: the foreground's number of the step.
        period: `SHORTEST_PERIOD` times a power of two.
    """
    if number % SHORTEST_PERIOD != _draw(number // SHORTEST_PERIOD, 0) % (
        SHORTEST_PERIOD
    ):
        return False
    half = SHORTEST_PERIOD
    while half < period:
        if number // half % 2 != _draw(number // (2 * half), half) % 2:
            return False
        half *= 2
    return True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A complete step of the foreground."""

    duration_s: float

    had_task: bool
    """Whether a task of the background ran in it."""

    had_request: bool = True
    """Whether the background waited for a lease in it."""

    number: int | None = None
    """The foreground's number of it; the next one if ``None``."""

    late_s: float = 0.0
    """How long tasks outlasted the waits in which they ran."""

    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds waited, by kind."""


class Comparison(NamedTuple):
    """The loss, estimated from blocks of steps."""

    loss: float
    """How much longer the steps with background are, as a share."""

    low: float
    """The loss less some standard errors."""

    high: float
    """The loss plus as many."""


class _Step(NamedTuple):
    number: int
    log: float
    record: StepRecord


class PairedBlock(NamedTuple):
    """Steps with background, and the control steps around them."""

    steps: list[_Step]
    controls: list[_Step]


@final
class PairedSteps:
    """Blocks of steps with background between control steps."""

    def __init__(self) -> None:
        """Start without steps."""
        self.reset()

    def reset(self) -> None:
        """Forget everything, for another foreground."""
        self._recent: deque[_Step] = deque(maxlen=_RECENT)
        self._pattern: tuple[float, ...] = ()
        self._until_look = _LOOK_EVERY
        self._before: list[_Step] = []
        self.clear()

    def clear(self, *, keeps_control: bool = True) -> None:
        """Forget the blocks, after a change of the background.

        Args:
            keeps_control: begin the next block with the last control step.
        """
        self._blocks: deque[PairedBlock] = deque(maxlen=MAX_BLOCKS)
        self._steps: list[_Step] = []
        self._before = self._before[-1:] if keeps_control else []

    @property
    def blocks(self) -> int:
        """Complete blocks since the last `clear`, at most `MAX_BLOCKS`."""
        return len(self._blocks)

    def last_blocks(self, count: int) -> list[PairedBlock]:
        """Return the last blocks, oldest first."""
        return list(self._blocks)[-count:]

    def add_step(self, number: int, step: StepRecord) -> None:
        """Add a step in which a task ran."""
        added = _Step(number, _log(step), step)
        self._steps.append(added)
        self._recent.append(added)
        self._until_look -= 1
        if self._until_look <= 0:
            self._until_look = _LOOK_EVERY
            self._pattern = _pattern_of(self._recent)

    def add_control(self, number: int, step: StepRecord) -> bool:
        """Add a control step; return whether it ends a block."""
        added = _Step(number, _log(step), step)
        if self._before and len(self._steps) >= _MIN_STEPS:
            self._blocks.append(PairedBlock(self._steps, [*self._before, added]))
            self._steps, self._before = [], [added]
            return True
        if not self._before:
            self._steps = []
        self._before = [*self._before, added][-_MAX_CONTROLS:]
        return False

    def compare(self, count: int, errors: float = 0.0) -> Comparison:
        """Return what the last blocks say of the loss.

        Args:
            count: of blocks; there must be one.
            errors: standard errors by which `Comparison.low` and `high` differ from
                the loss.
        """
        blocks = self.last_blocks(count)
        pairs = [self._differences(block) for block in blocks]
        found = statistics.median(itertools.chain.from_iterable(pairs))
        within = self._noise() * self._shrinks(blocks)
        between = _neighbors(list(map(statistics.median, pairs)))
        # Where control steps differ, the foreground may have changed in between.
        change = statistics.fmean(map(self._change, blocks)) / 2.0
        error = errors * max(within, max(between, change) / math.sqrt(len(blocks)))
        return Comparison(
            math.expm1(found), math.expm1(found - error), math.expm1(found + error)
        )

    def has_drifted(self, least: float) -> bool:
        """Return whether the last steps are longer than those before, beyond noise.

        Args:
            least: share by which they must be longer.
        """
        logs = [self._relative(step) for step in self._recent]
        last, before = logs[-_DRIFT_STEPS:], logs[: -2 * _DRIFT_STEPS]
        if len(before) < 2 * _DRIFT_STEPS:
            return False
        before = before[-4 * _DRIFT_STEPS :]
        error = self._noise() * math.sqrt(
            _MEDIAN_COST * (1.0 / len(last) + 1.0 / len(before))
        )
        more = statistics.median(last) - statistics.median(before)
        return more > max(math.log1p(least), _DRIFT_ERRORS * error)

    def _relative(self, step: _Step) -> float:
        if not self._pattern:
            return step.log
        return step.log - self._pattern[step.number % len(self._pattern)]

    def _differences(self, block: PairedBlock) -> list[float]:
        controls = [self._relative(step) for step in block.controls]
        return [
            log - control
            for log in map(self._relative, block.steps)
            for control in controls
        ]

    def _change(self, block: PairedBlock) -> float:
        first, last = block.controls[0], block.controls[-1]
        return abs(self._relative(last) - self._relative(first))

    def _noise(self) -> float:
        """Return the standard deviation of one step, as its neighbors show it."""
        differences = [
            abs(self._relative(two) - self._relative(one))
            for one, two in itertools.pairwise(self._recent)
        ]
        if not differences:
            return math.inf
        # A few differences may be small by chance.
        doubt = 1.0 + 2.0 / len(differences)
        return doubt * _deviation(statistics.fmean(differences))

    def _shrinks(self, blocks: Sequence[PairedBlock]) -> float:
        """Return the standard error of blocks over the deviation of one step."""
        steps = sum(len(block.steps) for block in blocks)
        controls = 1 + sum(len(block.controls) - 1 for block in blocks)
        known = _MEDIAN_COST * len(self._pattern) / max(len(self._recent), 1)
        return math.sqrt(1.0 / steps + (1.0 + known) / controls)


def _log(step: StepRecord) -> float:
    return math.log(max(step.duration_s, 1e-9))


def _deviation(difference: float) -> float:
    """Return the standard deviation of normal draws with this mean difference."""
    return difference * math.sqrt(math.pi) / 2.0


def _neighbors(values: Sequence[float]) -> float:
    """Return the standard deviation of values, as their neighbors show it."""
    if len(values) < 3:
        return 0.0
    return _deviation(
        statistics.fmean(abs(b - a) for a, b in itertools.pairwise(values))
    )


def _pattern_of(steps: Sequence[_Step]) -> tuple[float, ...]:
    """Return what each place of a repeated pattern adds to a step's logarithm.

    Returns:
        By the step's number modulo the length; empty if there is no pattern.
    """
    first, last = steps[0].number, steps[-1].number
    logs: list[float | None] = [None] * min(last - first + 1, 2 * _RECENT)
    for step in steps:
        if last - step.number < len(logs):
            logs[step.number - last - 1] = step.log
    differs = {
        period: found
        for period in range(1, min(_LONGEST_PATTERN, len(logs) // _REPEATS) + 1)
        if (found := _difference_at(period, logs)) is not None
    }
    if 1 not in differs:
        return ()
    best = min(differs.values())
    if best > _CLEARER * differs[1]:
        return ()
    period = next(p for p, d in differs.items() if d <= _SIMILAR * best)
    places: list[list[float]] = [[] for _ in range(period)]
    for step in steps:
        places[step.number % period].append(step.log)
    if min(map(len, places)) < 2:
        return ()
    usual = list(map(statistics.median, places))
    mean = statistics.fmean(usual)
    return tuple(log - mean for log in usual)


def _difference_at(period: int, logs: Sequence[float | None]) -> float | None:
    found = [
        abs(two - one)
        for one, two in zip(logs, logs[period:], strict=False)
        if one is not None and two is not None
    ]
    return statistics.fmean(found) if len(found) >= period else None
