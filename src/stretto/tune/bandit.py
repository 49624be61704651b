"""Choose which technique proposes next: AIACC-Training's meta solver.

A multi-armed bandit with a sliding window and area-under-the-curve credit (AIACC
section VI; OpenTuner, Ansel et al. 2014; Fialho et al. 2010).
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 50
EXPLORATION = 0.2
"""AIACC's default of C."""


@final
class Bandit:
    r"""Choose among arms by their recent results.

    The score of arm $t$ is $AUC_t + C \sqrt{2 \log_2 |H| / H_t}$ with $|H|$ uses in the
    window and $H_t$ of them by $t$. $AUC_t$: along the arm's uses in the window, a
    curve rises by one where a use brought a new best and stays flat otherwise. The area
    below it is taken as a share of the area if every use were a new best, so a recent
    success counts more. An arm without a use in the window comes first. Ties go to the
    arm used longest ago, then to the given order, so equal histories give equal choices
    on every rank.
    """

    def __init__(
        self,
        arms: Sequence[str],
        *,
        window: int = WINDOW,
        exploration: float = EXPLORATION,
    ) -> None:
        """Take the arms by name, the number of uses that count, and C.

        Raises:
            SpecError: there is no arm, an arm is duplicated, or an option is out of
                range.
        """
        if not arms or len(set(arms)) < len(arms):
            raise SpecError(f"arms must be different and at least one, got {arms!r}")
        if window < 1:
            raise SpecError(f"window must be >= 1, got {window}")
        if not (math.isfinite(exploration) and exploration >= 0):
            raise SpecError(f"exploration must be >= 0, got {exploration}")
        self._arms = tuple(arms)
        self._exploration = exploration
        self._history: deque[tuple[str, bool]] = deque(maxlen=window)

    def choose(self, open_arms: Sequence[str] | None = None) -> str:
        """Return the next arm to use among those that are still open.

        Raises:
            SpecError: no arm is open, or one is unknown.
        """
        arms = self._arms if open_arms is None else tuple(open_arms)
        unknown = set(arms).difference(self._arms)
        if not arms or unknown:
            raise SpecError(
                f"no arm to choose from, or unknown ones: {sorted(unknown)}"
            )
        last_use = {arm: i for i, (arm, _) in enumerate(self._history)}
        return min(
            arms,
            key=lambda a: (-self.score(a), last_use.get(a, -1), self._arms.index(a)),
        )

    def tell(self, arm: str, *, improved: bool) -> None:
        """Record whether ``arm`` brought a new best; a missing proposal did not."""
        self._history.append((arm, improved))

    def score(self, arm: str) -> float:
        """Return the score; infinite for an arm without a use in the window."""
        uses = sum(1 for name, _ in self._history if name == arm)
        if uses == 0:
            return math.inf
        length = len(self._history)
        return self.credit(arm) + self._exploration * math.sqrt(
            2 * math.log2(length) / uses
        )

    def credit(self, arm: str) -> float:
        """Return the arm's area under the curve within the window, 0 to 1."""
        improved = [new_best for name, new_best in self._history if name == arm]
        uses = len(improved)
        if uses == 0:
            return 0.0
        # A rise at use i lifts every use from i on, so it is worth uses - i + 1. Summed
        # in window order with recent successes worth more, that is OpenTuner's sum of i
        # over the successes.
        area = sum(i for i, new_best in enumerate(improved, start=1) if new_best)
        return area / (uses * (uses + 1) / 2)
