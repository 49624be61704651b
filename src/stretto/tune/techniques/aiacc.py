"""AIACC-Training's techniques and the bandit that chooses among them.

Grid, population-based and Bayesian search, and Hyperband.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from stretto.errors import SpecError
from stretto.tune.techniques.base import MIN_STEPS, AbstractTechnique, Proposal

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from stretto.tune.search_space import Point, Space
    from stretto.tune.techniques.base import SearchContext


@final
class GridTechnique(AbstractTechnique):
    """Propose all points of the space, spread out first.

    A budget rarely covers the whole grid, so points come in bit-reversed order of their
    position (van der Corput): after any number of points, those tried are spread over
    the whole grid. Points that other techniques tried are skipped.
    """

    name: ClassVar[str] = "grid"

    def __init__(self, space: Space) -> None:
        """Create the search order over a space's grid."""
        number = len(space.points)
        bits = max(1, (number - 1).bit_length())
        order = sorted(range(number), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
        self._waiting = deque(space.points[i] for i in order)
        self._tried: set[Point] = set()

    def ask(self) -> Proposal | None:
        """Return the next untried point."""
        while self._waiting and self._waiting[0] in self._tried:
            self._waiting.popleft()
        return Proposal(point=self._waiting[0]) if self._waiting else None

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Remove the point from the queue."""
        del step_s, mine
        self._tried.add(proposal.point)


MEMBERS = 6
_TRIES = 8


@final
class PopulationTechnique(AbstractTechnique):
    """A population in which the worst members copy the best and mutate.

    Members are tried in turn. After its turn, a member of the worst quarter (at least
    one) takes the point of a member of the best quarter (exploit) and moves one of its
    axes by one position, either way (explore). A point found by another technique
    replaces the worst member if it beats the best.
    """

    name: ClassVar[str] = "population"

    @classmethod
    def of(cls, context: SearchContext) -> Self:
        """Return the technique with the search's generator."""
        return cls(context.space, context.rng)

    def __init__(
        self, space: Space, rng: random.Random, *, members: int = MEMBERS
    ) -> None:
        """Draw a population from the space.

        Raises:
            SpecError: there are fewer than two members.
        """
        if members < 2:
            raise SpecError(f"members must be >= 2, got {members}")
        self._space = space
        self._rng = rng
        drawn = rng.sample(space.points, min(members, len(space.points)))
        self._members: list[Point] = list(drawn)
        self._scores_s: list[float | None] = [None] * len(drawn)
        self._turn = 0

    def ask(self) -> Proposal | None:
        """Return the next member's point."""
        return Proposal(point=self._members[self._turn])

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Score the member, and replace it if it is among the worst."""
        if not mine:
            self._immigrate(proposal.point, step_s)
            return
        self._scores_s[self._turn] = step_s
        if None not in self._scores_s:
            self._learn(self._turn)
        self._turn = (self._turn + 1) % len(self._members)

    def _immigrate(self, point: Point, step_s: float) -> None:
        known = [math.inf if s is None else s for s in self._scores_s]
        if point in self._members or step_s >= min(known):
            return
        worst = max(range(len(known)), key=known.__getitem__)
        if worst != self._turn:  # its proposal may be under way
            self._members[worst] = point
            self._scores_s[worst] = step_s

    def _learn(self, member: int) -> None:
        scores_s = [math.inf if s is None else s for s in self._scores_s]
        ranked = sorted(range(len(scores_s)), key=scores_s.__getitem__)
        quarter = max(1, len(ranked) // 4)
        if member not in ranked[-quarter:]:
            return
        better = self._members[self._rng.choice(ranked[:quarter])]
        self._members[member] = self._explored(better)
        self._scores_s[member] = None

    def _explored(self, point: Point) -> Point:
        """Return a neighbor of a point that has another plan."""
        axes = [i for i, length in enumerate(self._space.shape) if length > 1]
        moved = point
        for _ in range(_TRIES if axes else 0):
            axis = self._rng.choice(axes)
            place = point[axis] + self._rng.choice((-1, 1))
            if not 0 <= place < self._space.shape[axis]:
                continue
            moved = self._space.canonical((*point[:axis], place, *point[axis + 1 :]))
            if moved != point:
                break
        return moved


STARTUP_TRIALS = 8
_WORSE_RATIO = 2.0
_SKIPS = 4


@final
class BayesTechnique(AbstractTechnique):
    """Optuna's tree-structured Parzen estimator over the axes' positions.

    A library's sampler is better tested than our own would be. The estimator is used
    rather than Optuna's Gaussian process because it proposes within a millisecond
    between two training steps. It receives every result, including other techniques'.
    """

    name: ClassVar[str] = "bayes"

    @classmethod
    def of(cls, context: SearchContext) -> Self:
        """Return the technique with the search's seed.

        Raises:
            SpecError: Optuna is not installed.
        """
        return cls(context.space, seed=context.seed)

    def __init__(
        self, space: Space, *, seed: int, startup_trials: int = STARTUP_TRIALS
    ) -> None:
        """Create an estimator over a space, random for its first ``startup_trials``.

        Raises:
            SpecError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError as exc:
            raise SpecError(
                "Bayesian optimization needs Optuna: pip install 'stretto[tune]'"
            ) from exc
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=startup_trials, multivariate=True
            )
        self._optuna: Any = optuna
        self._space = space
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._distributions: dict[str, Any] = {
            axis.name: optuna.distributions.IntDistribution(0, len(axis.values) - 1)
            for axis in space.axes
            if len(axis.values) > 1
        }
        self._asked: Any = None
        self._worst_s = 0.0
        self._tried: set[Point] = set()

    def ask(self) -> Proposal | None:
        """Return the estimator's most promising point, preferably a new one."""
        for left in reversed(range(_SKIPS)):
            asked = self._study.ask(self._distributions)
            at = asked.params
            point = self._space.canonical(
                tuple(int(at.get(axis.name, 0)) for axis in self._space.axes)
            )
            if point not in self._tried or not left:
                break
            # Already measured, so it is not run again.
            self._study.tell(asked, state=self._optuna.trial.TrialState.PRUNED)
        self._asked = asked
        return Proposal(point=point)

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Add the result to the study."""
        self._tried.add(proposal.point)
        if math.isfinite(step_s):
            self._worst_s = max(self._worst_s, step_s)
        else:
            # The estimator takes no infinity: a point that can't run counts as the
            # worst.
            step_s = _WORSE_RATIO * (self._worst_s or 1.0)
        if mine and self._asked is not None:
            self._study.tell(self._asked, step_s)
            self._asked = None
            return
        params = {
            axis.name: place
            for axis, place in zip(self._space.axes, proposal.point, strict=True)
            if len(axis.values) > 1
        }
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=params, distributions=self._distributions, value=step_s
            )
        )


MAX_STEPS = 9
FACTOR = 3


@final
class HyperbandTechnique(AbstractTechnique):
    """Halve successively in brackets from broad to deep, then start over.

    With ``R = max_steps / min_steps`` and ``s_max = floor(log_factor R)``, bracket
    ``s`` begins with ``ceil((s_max + 1) factor^s / (s + 1))`` random points measured
    over ``max_steps / factor^s`` steps each, keeps the best ``1 / factor`` of them,
    gives these ``factor`` times as many steps, and so on (Li et al., Algorithm 1).
    """

    name: ClassVar[str] = "hyperband"

    @classmethod
    def of(cls, context: SearchContext) -> Self:
        """Return the technique with the search's generator."""
        return cls(context.space, context.rng)

    def __init__(
        self,
        space: Space,
        rng: random.Random,
        *,
        max_steps: int = MAX_STEPS,
        factor: int = FACTOR,
    ) -> None:
        """Create brackets over a space.

        Raises:
            SpecError: an option is out of range.
        """
        if max_steps < MIN_STEPS:
            raise SpecError(f"max_steps must be >= {MIN_STEPS}, got {max_steps}")
        if factor < 2:
            raise SpecError(f"factor must be >= 2, got {factor}")
        self._space = space
        self._rng = rng
        self._max_steps = max_steps
        self._factor = factor
        # Integer logarithm: floating point would lose whole brackets.
        self._brackets = 0
        while MIN_STEPS * factor ** (self._brackets + 1) <= max_steps:
            self._brackets += 1
        self._bracket = self._brackets + 1
        self._waiting: list[Point] = []
        self._scored: list[tuple[float, Point]] = []
        self._steps = 0
        self._rung = 0

    def ask(self) -> Proposal | None:
        """Return the next point of the rung."""
        if not self._waiting:
            self._advance()
        return Proposal(point=self._waiting[0], steps=self._steps)

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Score a point of the rung."""
        if mine:
            self._scored.append((step_s, proposal.point))
            self._waiting.pop(0)

    def _advance(self) -> None:
        kept = len(self._scored) // self._factor
        if self._rung < self._bracket <= self._brackets and kept:
            self._rung += 1
            self._scored.sort()
            self._waiting = [point for _, point in self._scored[:kept]]
            self._steps *= self._factor
        else:
            self._bracket = self._brackets if self._bracket < 1 else self._bracket - 1
            s = self._bracket
            number = math.ceil((self._brackets + 1) * self._factor**s / (s + 1))
            number = min(number, len(self._space.points))
            self._waiting = self._rng.sample(self._space.points, number)
            self._steps = self._max_steps // self._factor**s
            self._rung = 0
        self._scored = []


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
