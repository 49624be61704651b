"""Planners by name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.planners.aiacc import AiaccPlanner
from stretto.planners.asc_wfbp import AscWfbpPlanner
from stretto.planners.ddp import DdpPlanner
from stretto.planners.exhaustive import ExhaustivePlanner
from stretto.planners.fusion import FusionPlanner
from stretto.planners.horovod import HorovodPlanner
from stretto.planners.joint import JointPlanner
from stretto.planners.libra import LibraPlanner
from stretto.planners.libra_m import LibraMPlanner
from stretto.planners.mg_wfbp import MgWfbpPlanner
from stretto.planners.single import SinglePlanner
from stretto.planners.wfbp import WfbpPlanner

if TYPE_CHECKING:
    from stretto.planners.base import AbstractPlanner

_PLANNERS: dict[str, type[AbstractPlanner]] = {
    planner.name: planner
    for planner in (
        SinglePlanner,
        WfbpPlanner,
        DdpPlanner,
        HorovodPlanner,
        MgWfbpPlanner,
        FusionPlanner,
        AscWfbpPlanner,
        LibraMPlanner,
        LibraPlanner,
        AiaccPlanner,
        JointPlanner,
        ExhaustivePlanner,
    )
}

NAMES = tuple(name for name in _PLANNERS if name != ExhaustivePlanner.name)
"""The planners to compare, plainest first; `get` also accepts ``exhaustive``."""


def get(name: str, **options: Any) -> AbstractPlanner:
    """Return the planner of a name with its options.

    Raises:
        SpecError: the planner or an option is unknown.
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SpecError(f"planner {name} has no option {option!r}; {has}")
    return _PLANNERS[name](**options)


def options_of(name: str) -> tuple[str, ...]:
    """Return the names of a planner's options.

    Raises:
        SpecError: the planner is unknown.
    """
    if name not in _PLANNERS:
        raise SpecError(
            f"planner must be one of {', '.join(_PLANNERS)}, got {name!r}",
            place=".planner",
        )
    parameters = inspect.signature(_PLANNERS[name]).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
