"""Techniques that propose plans, behind one interface."""

from stretto.tune.techniques.base import LEAST_STEPS, AbstractTechnique, Proposal
from stretto.tune.techniques.bayes import BayesTechnique
from stretto.tune.techniques.coordinate import CoordinateTechnique
from stretto.tune.techniques.grid import GridTechnique
from stretto.tune.techniques.hyperband import HyperbandTechnique
from stretto.tune.techniques.population import PopulationTechnique
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
