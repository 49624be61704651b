"""Decide when a background's task may start, and adapt to what it costs. Pure.

`Gate` decides about one task. `Controller` compares steps with and without background
and changes the gate's limits. Times come from the caller, so both run in virtual time.

# Note [What a task may cost]
On a device that cannot preempt, the foreground waits until the tasks that were launched
have ended. With m outstanding and b the length of a task, a wait of the foreground ends
(m - 1/2) * b late on average, while b is shorter than the wait. A task that fits what
is left of the window costs nothing, except for the prediction's error.

On a busy machine a wait's length differs from step to step by more than a task, so no
prediction says which task is its last. But the cost is known: tasks until the end of
the k longest waits of a step cost k * (m - 1/2) * b. While that is a small share of the
step (`Gate.late_ratio`), tasks run in these waits until they end.

# Note [What is acted upon]
Losses of the last 1, 2, 4 and up to 32 blocks are compared with the limit (see
`paired_steps`), each less some standard errors. So a loss that is large against the
noise counts at once, a smaller one when enough blocks show it, and noise alone changes
little.

# Note [Several ranks]
Ranks of one job wait for each other, so a background on any of them lengthens the steps
of all. One step in 16 is a control step (in 4 and then in 8 while little is known), and
one in 64 once the loss is clearly within its limit. Ranks agree on them, so the control
steps of the longest period are without background on all ranks, and each controller
keeps the loss by all backgrounds within the limit. While steps become longer than
before, one in 16 is a control step again.

# Note [What is tried again]
A loss may come from other work on the machine, which ends. So whatever the controller
has closed, banned or changed is tried again, after twice as long each time, up to 16
times. It was shown to be harmful before, so a trial ends as soon as its blocks together
show a loss above the limit, even within the noise: where steps differ much, proof would
take hundreds of steps.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from stretto.background.paired_steps import PairedSteps, is_control_step
from stretto.background.windows import Expected
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.background.paired_steps import PairedBlock, StepRecord

PERIODS = (4, 8, 16, 64)
"""Steps of which one is a control step: while little is known, at the start and after a
change; then; after several blocks within the limit; and while the loss is clearly
within it. A control step is idle time that no task uses."""

MAX_MARGIN = 4.0
"""Margin beyond which the background is closed."""

_FIRST_MARGIN = 0.1
_MIN_MARGIN = 0.05
_GOOD_BLOCKS = 4
"""Blocks within the limit before limits are relaxed by one step, and before one step in
16 is a control step."""

_SETTLED_BLOCKS = 12
"""The same before one step in 64 is."""

_CLOSED_STEPS = 256
"""Steps before a closed background is tried again, or the device's own policy; doubles
each time, `_DOUBLINGS` times."""

_BANNED_BLOCKS = 8
"""Blocks before a banned kind of wait is tried again; doubles in the same way."""

_DOUBLINGS = 4

_TRIAL_BLOCKS = 8
"""Blocks of a trial, see Note [What is tried again]; the first one may be chance."""

_USUAL_NOISE = 0.02
"""The noise of one block's loss."""

_SURE, _SURE_OF_FEW = 2.0, 2.5
"""Standard errors by which a loss must exceed its limit; for one or two blocks more."""

_LOOK_EVERY = 4
"""Steps between two looks for steps that become longer."""

_SHOWN_BLOCKS = 8
"""Last blocks whose loss is shown."""

_ROUNDING_S = 1e-9

_TO_BLAME = 0.5
"""Share of the loss that a kind of wait must account for to be banned."""

_LATE_TO_BLAME = 0.25
"""Share of the loss from which tasks that outlast waits are to blame instead. A step
waits for the latest of several ranks, which loses more than each one's own tasks."""


class Policy(enum.Enum):
    """When a task may start."""

    FITS = "fits"
    """In a wait, if it fits what is left of the predicted window, or if it costs little
    not to (`Gate.late_ratio`)."""

    OUTSTANDING = "outstanding"
    """At any time, up to a number of outstanding tasks; for devices that preempt."""


class Reason(enum.Enum):
    """Why a task may start, or not."""

    NO_FOREGROUND = "no foreground runs"
    FITS = "the task fits the window"
    CHEAP = "the task may outlast this wait at a small cost"
    DEPTH = "fewer tasks are outstanding than allowed"
    STALE = "the foreground has stopped writing marks"
    CONTROL = "a control step runs"
    CLOSED = "the foreground's loss is above its limit"
    BANNED = "a background slows down waits of this kind"
    COMPUTING = "the foreground computes"
    UNKNOWN = "the length of this wait is not yet known"
    TOO_LONG = "the task does not fit what is left of the window"
    FULL = "as many tasks are outstanding as allowed"


OPEN = frozenset({Reason.NO_FOREGROUND, Reason.FITS, Reason.CHEAP, Reason.DEPTH})
"""Reasons for which a task may start."""


@final
@dataclass(slots=True, kw_only=True)
class Situation:
    """The inputs of a decision. Not frozen: one is made for each look."""

    has_foreground: bool

    is_stale: bool = False
    """The foreground's process lives, but its last mark is too old."""

    is_waiting: bool = False
    kind: str = ""
    """The kind of wait."""

    remaining_s: float | None = None
    """The rest of the predicted window; ``None`` if unknown."""

    longest_s: float = 0.0
    """The longest predicted window of the step."""

    wait: Expected | None = None
    """The window learned for the present wait."""

    step_s: float = 0.0
    """Usual length of a step."""

    outstanding: int = 0
    """Tasks that have been started and have not ended."""


@final
@dataclass(slots=True)
class Gate:
    """Decides about one task. The controller changes its limits."""

    policy: Policy = Policy.FITS
    depth: int = 1
    """Maximum number of outstanding tasks."""

    margin: float = _FIRST_MARGIN
    """A task fits a window if (1 + margin) times its length does."""

    late_ratio: float = 0.0
    """Share of the foreground's step that tasks may cost that outlast its waits; see
    Note [What a task may cost]."""

    closed_kinds: frozenset[str] = frozenset()
    """Kinds of waits in which no task may start, whatever the controller finds."""

    banned: set[str] = field(default_factory=set)
    """Kinds of waits that the controller has closed."""

    is_control: bool = False
    is_closed: bool = False

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise SpecError(f"depth must be at least 1, got {self.depth}")
        if not (self.margin >= 0.0 and math.isfinite(self.margin)):
            raise SpecError(f"margin must be at least 0, got {self.margin:g}")
        if not 0.0 <= self.late_ratio < 1.0:
            raise SpecError(
                f"late_ratio must be at least 0 and below 1, got {self.late_ratio:g}"
            )

    def decide(self, now: Situation, task_s: float | None) -> Reason:
        """Return why a task may start now, or why not.

        Args:
            now: what the foreground does.
            task_s: the task's usual length; ``None`` if it has not run before.
        """
        reason = Reason.DEPTH
        if not now.has_foreground:
            reason = Reason.NO_FOREGROUND
        elif now.is_stale:
            reason = Reason.STALE
        elif self.is_closed:
            reason = Reason.CLOSED
        elif self.is_control:
            reason = Reason.CONTROL
        elif now.outstanding >= self.depth:
            reason = Reason.FULL
        elif now.is_waiting and self._closes(now.kind):
            reason = Reason.BANNED
        elif self.policy is Policy.FITS:
            reason = self._fits(now, task_s)
        return reason

    def _closes(self, kind: str) -> bool:
        return kind in self.closed_kinds or kind in self.banned

    def _fits(self, now: Situation, task_s: float | None) -> Reason:
        if not now.is_waiting:
            return Reason.COMPUTING
        if now.remaining_s is None:
            return Reason.UNKNOWN
        if task_s is None:
            # Its first run is the measurement: in a long window, soon after its begin.
            fits = now.remaining_s >= 0.75 * now.longest_s > 0.0
        else:
            length_s = task_s * (1.0 + self.margin) * (1 + now.outstanding)
            fits = length_s <= now.remaining_s + _ROUNDING_S
            if not fits and self._is_cheap(now, task_s):
                return Reason.CHEAP
        return Reason.FITS if fits else Reason.TOO_LONG

    def _is_cheap(self, now: Situation, task_s: float) -> bool:
        wait = now.wait
        if wait is None or not self.late_ratio:
            return False
        if wait.usual_s < task_s or wait.usual_s - wait.short_s < 0.5 * task_s:
            return False  # its end is known well enough, or always too early
        cost_s = wait.longer * (now.outstanding + 0.5) * task_s
        return cost_s <= self.late_ratio * now.step_s


@final
@dataclass(slots=True)
class _Ban:
    blocks_left: int
    tries: int


@final
class Controller:
    """Keeps the foreground's loss under a limit, by changing a gate.

    A loss above the limit doubles the margin and halves the depth, at once; at depth 1
    the policy becomes ``FITS``. If one kind of wait accounts for most of the loss, it
    is banned instead. Blocks within the limit relax these by small steps. If nothing is
    left to tighten, the gate is closed, and tried again after many steps.
    """

    def __init__(self, gate: Gate, *, max_loss: float) -> None:
        """Start with a control step.

        Args:
            gate: whose limits to change.
            max_loss: the foreground's permitted loss, for instance 0.05.
        """
        if not 0.0 <= max_loss < math.inf:
            raise SpecError(f"max_loss must be at least 0, got {max_loss:g}")
        self.gate = gate
        self.max_loss = max_loss
        self.loss = 0.0
        """Loss of the last blocks since the last change of limits."""

        self.loss_error = math.inf
        """Two standard errors of it; infinite before the first block has ended."""

        self.closings = 0
        """How often the background has been closed because of its loss."""

        self.last_block: tuple[float | None, float] = (None, 0.0)
        """Loss of the block that the last control step ended, and the step without
        background, in seconds; ``None`` if there is no such block."""

        self.keep_first()
        self._paired = PairedSteps()
        self._bans: dict[str, _Ban] = {}
        self._begin()

    def keep_first(self) -> None:
        """Make the gate's limits those that `reset` restores."""
        self._first = dataclasses.replace(self.gate, banned=set())

    def _begin(self) -> None:
        self._good, self._period = 0, PERIODS[0]
        self._closed_left = self._policy_left = self._policy_changes = 0
        self._is_trial = False
        self._number = self._control_at = 0
        self.gate.is_control = True

    def add(self, step: StepRecord) -> bool:
        """Add the foreground's next step; return whether a control step has ended."""
        before = self._number
        self._number = self._number + 1 if step.number is None else step.number
        if self._number < before:  # steps of another model
            self._changed()
            self._paired.reset()
            self._control_at = self._number
        if self.gate.is_closed:
            self._wait_closed()
            return False
        self._wait_for_policy()
        if self.gate.is_control:
            if step.had_task or self._number < self._control_at:
                return False
            if step.had_request:
                self._end_control(step)
            self._plan_control()
            return step.had_request
        if step.had_task:
            self._paired.add_step(self._number, step)
            looks = self._period == PERIODS[-1] and self._number % _LOOK_EVERY == 0
            if looks and self._paired.has_drifted(self.max_loss):
                self._good, self._period = _GOOD_BLOCKS, PERIODS[-2]
        self._plan_control()
        return False

    def _plan_control(self) -> None:
        following = self._number + 1
        self.gate.is_control = is_control_step(following, self._period)
        self._control_at = following

    def reset(self) -> None:
        """Start again, for another foreground."""
        gate = self.gate
        gate.policy, gate.depth = self._first.policy, self._first.depth
        gate.margin, gate.is_closed = self._first.margin, False
        gate.late_ratio = self._first.late_ratio
        gate.banned.clear()
        self.loss, self.loss_error, self.closings = 0.0, math.inf, 0
        self._paired.reset()
        self._bans.clear()
        self._begin()

    def _end_control(self, control: StepRecord) -> None:
        paired = self._paired
        self.last_block = (None, 0.0)
        if not paired.add_control(self._number, control):
            return
        (block,) = paired.last_blocks(1)
        base_s = statistics.fmean(c.record.duration_s for c in block.controls)
        self.last_block = (paired.compare(1).loss, base_s)
        shown = paired.compare(min(paired.blocks, _SHOWN_BLOCKS), _SURE)
        self.loss, self.loss_error = shown.loss, shown.high - shown.loss
        if (count := self._harmful_blocks()) is not None:
            self._tighten(paired.last_blocks(count))
            return
        if self._end_bans():
            self._try_again()
            return
        if self.loss <= self.max_loss:
            self._good += 1
            if self._good % _GOOD_BLOCKS == 0:
                self._relax()
        is_settled = self._good >= _SETTLED_BLOCKS and shown.high <= self.max_loss
        known = (self._good >= 2) + (self._good >= _GOOD_BLOCKS) + is_settled
        self._period = PERIODS[known]

    def _harmful_blocks(self) -> int | None:
        """Return of how many last blocks the loss exceeds the limit, if of any."""
        blocks = self._paired.blocks
        if self._is_trial and blocks > 1:
            found = self._paired.compare(blocks)
            if found.loss - _USUAL_NOISE / blocks > self.max_loss:
                return blocks
            self._is_trial = blocks < _TRIAL_BLOCKS
        count = 1
        while count <= self._paired.blocks:
            found = self._paired.compare(count, _SURE if count > 2 else _SURE_OF_FEW)
            if min(found.low, found.loss - _USUAL_NOISE / count) > self.max_loss:
                return count
            count *= 2
        return None

    def _tighten(self, blocks: Sequence[PairedBlock]) -> None:
        gate = self.gate
        kind = _to_blame(blocks)
        if kind is not None and kind not in gate.banned:
            tries = self._bans[kind].tries if kind in self._bans else 0
            self._bans[kind] = _Ban(_BANNED_BLOCKS << min(tries, _DOUBLINGS), tries + 1)
            gate.banned.add(kind)
        elif gate.policy is Policy.OUTSTANDING and gate.depth == 1:
            gate.policy = Policy.FITS
            tries, self._policy_changes = (
                self._policy_changes,
                self._policy_changes + 1,
            )
            self._policy_left = _CLOSED_STEPS << min(tries, _DOUBLINGS)
        else:
            gate.depth = max(1, gate.depth // 2)
            gate.margin = max(2.0 * gate.margin, _FIRST_MARGIN)
            gate.late_ratio /= 2.0
            if gate.policy is Policy.FITS and gate.margin > MAX_MARGIN:
                self._close()
        self._changed()

    def _changed(self) -> None:
        """Begin to compare again: the background is another."""
        self._good, self._period = 0, PERIODS[0]
        self._is_trial = False
        self._paired.clear(keeps_control=not self.gate.is_closed)

    def _try_again(self) -> None:
        """Begin to compare what was harmful before."""
        self._changed()
        self._is_trial = True

    def _wait_for_policy(self) -> None:
        """Try the device's own policy again once its time has come."""
        if self._policy_left:
            self._policy_left -= 1
            if not self._policy_left:
                self.gate.policy = self._first.policy
                self._try_again()

    def _relax(self) -> None:
        gate = self.gate
        gate.margin = max(_MIN_MARGIN, 0.9 * gate.margin)
        gate.late_ratio = min(self._first.late_ratio, 1.2 * gate.late_ratio)
        gate.depth = min(self._first.depth, gate.depth + 1)

    def _end_bans(self) -> bool:
        """Count a block; return whether a ban has ended with it."""
        before = len(self.gate.banned)
        for kind, ban in self._bans.items():
            if kind in self.gate.banned:
                ban.blocks_left -= 1
                if ban.blocks_left <= 0:
                    self.gate.banned.discard(kind)
        return len(self.gate.banned) < before

    def _close(self) -> None:
        self.gate.is_closed = True
        self._closed_left = _CLOSED_STEPS << min(self.closings, _DOUBLINGS)
        self.closings += 1

    def _wait_closed(self) -> None:
        self._closed_left -= 1
        if self._closed_left <= 0:
            self.gate.is_closed, self.gate.is_control = False, True
            self.gate.margin = MAX_MARGIN
            self._try_again()


def _to_blame(blocks: Sequence[PairedBlock]) -> str | None:
    """Return the kind of wait that accounts for most of the loss, if there is one.

    Where tasks outlast waits, ranks wait longer for each other: no kind suffers then.
    """
    steps = [step.record for block in blocks for step in block.steps]
    controls = [step.record for block in blocks for step in block.controls]
    excess_s = statistics.median(s.duration_s for s in steps) - statistics.median(
        s.duration_s for s in controls
    )
    more_s = {
        kind: statistics.median(s.waited_s.get(kind, 0.0) for s in steps)
        - statistics.median(s.waited_s.get(kind, 0.0) for s in controls)
        for kind in {kind for s in steps for kind in s.waited_s}
    }
    late_s = statistics.fmean(s.late_s for s in steps)
    if not more_s or late_s >= _LATE_TO_BLAME * excess_s:
        return None
    kind = max(sorted(more_s), key=lambda kind: more_s[kind])
    return kind if more_s[kind] >= _TO_BLAME * excess_s > 0.0 else None
