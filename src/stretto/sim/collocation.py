"""A predicted burst step with a background job beside each rank.

# Note [What a measured pair says about another plan]
A burst job and a background job are measured together under one plan. Two figures of
that measurement are assumed to hold for other plans: the ratio by which the background
lengthens the step, and the background's progress per usable second. The measured share
is the background's progress, divided by its progress alone in the same time; the
measured usable ratio is the part of the step that the background could use. Then under
a plan whose step takes t seconds, u of them usable, the background's share is
share / usable_ratio * u / t. For the plan that was measured this is the measured share.
On a rank that computes nothing in the step, the share is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.background.windows import usable_s
from stretto.schema.collocation import FITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.background.windows import Window
    from stretto.schema import CollocatedPair
    from stretto.sim.burst import BurstStep


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CollocatedStep:
    """One step of a burst plan with a background job beside each rank."""

    iteration_s: float
    """With the pair's loss."""

    background_by_rank: tuple[float, ...]
    """Each background's rate over its rate alone."""

    @property
    def background(self) -> float:
        """All backgrounds' rate over that of one on each rank alone."""
        return sum(self.background_by_rank) / len(self.background_by_rank)


def collocate(step: BurstStep, pair: CollocatedPair) -> CollocatedStep:
    """Return a step beside the pair's background, see Note.

    A negative loss is noise and counts as none. There is no loss where no task fits.
    """
    alone_s = step.iteration_s
    usable = [
        None if _is_free(windows, alone_s) else _usable_s(windows, pair)
        for windows in step.windows
    ]
    rates = tuple(
        1.0 if some_s is None else min(1.0, pair.use_ratio * some_s / alone_s)
        for some_s in usable
    )
    runs = pair.policy != FITS or any(usable)
    loss = max(0.0, pair.loss_ratio) if runs else 0.0
    return CollocatedStep(iteration_s=alone_s * (1.0 + loss), background_by_rank=rates)


def _is_free(windows: Sequence[Window], iteration_s: float) -> bool:
    return sum(window.length_s for window in windows) > (1.0 - 1e-9) * iteration_s


def _usable_s(windows: Sequence[Window], pair: CollocatedPair) -> float:
    if pair.policy == FITS:
        return usable_s(windows, pair.task_s)
    return sum(window.length_s for window in windows)
