"""Techniques that propose plans, behind one interface."""

from stretto.tune.techniques.aiacc import (
    BayesTechnique,
    GridTechnique,
    HyperbandTechnique,
    PopulationTechnique,
)
from stretto.tune.techniques.base import LEAST_STEPS, AbstractTechnique, Proposal
from stretto.tune.techniques.coordinate import CoordinateTechnique
from stretto.tune.techniques.predicted import PredictedTechnique

__all__ = [
    "LEAST_STEPS",
    "AbstractTechnique",
    "BayesTechnique",
    "CoordinateTechnique",
    "GridTechnique",
    "HyperbandTechnique",
    "PopulationTechnique",
    "PredictedTechnique",
    "Proposal",
]
