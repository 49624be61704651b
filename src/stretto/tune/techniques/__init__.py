"""Techniques that propose plans, behind one interface.

- `base`: the interface (shared, for instance by `aiacc` and `search`).
- `registry`: techniques by name, with those of installed packages (for `online_search`
  and `options`, and programs).
- `predicted`: the planner's own ranking (for `registry`, and programs).
- `coordinate`: coordinate descent, which follows it in the default search (for
  `registry`, and programs).
- `aiacc`: AIACC-Training's, and the bandit that chooses among all (shared, for instance
  by `registry` and `options`).
"""

from stretto.tune.techniques.aiacc import (
    BayesTechnique,
    GridTechnique,
    HyperbandTechnique,
    PopulationTechnique,
)
from stretto.tune.techniques.base import (
    MIN_STEPS,
    AbstractTechnique,
    Proposal,
    SearchContext,
)
from stretto.tune.techniques.coordinate import CoordinateTechnique
from stretto.tune.techniques.predicted import PredictedTechnique
from stretto.tune.techniques.registry import technique_of

__all__ = [
    "MIN_STEPS",
    "AbstractTechnique",
    "BayesTechnique",
    "CoordinateTechnique",
    "GridTechnique",
    "HyperbandTechnique",
    "PopulationTechnique",
    "PredictedTechnique",
    "Proposal",
    "SearchContext",
    "technique_of",
]
