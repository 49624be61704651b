"""Bayesian optimization with Optuna's samplers."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, final

from stretto.errors import SpecError
from stretto.tune.techniques.base import AbstractTechnique, Proposal

if TYPE_CHECKING:
    from stretto.tune.search_space import Point, Space

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
