"""Planners by name: stretto's own, and those that installed packages bring.

A package adds a planner by an entry point of the group `ENTRY_POINTS`, whose name is
the planner's and whose value is its class.
"""

from __future__ import annotations

import inspect
from typing import Any

from stretto.errors import SpecError
from stretto.planners.aiacc import AiaccPlanner
from stretto.planners.asc_wfbp import AscWfbpPlanner
from stretto.planners.base import AbstractPlanner
from stretto.planners.ddp import DdpPlanner
from stretto.planners.dear import DearPlanner
from stretto.planners.exhaustive import ExhaustivePlanner
from stretto.planners.fusion import FusionPlanner
from stretto.planners.horovod import HorovodPlanner
from stretto.planners.joint import JointPlanner
from stretto.planners.libra import LibraPlanner
from stretto.planners.libra_m import LibraMPlanner
from stretto.planners.mg_wfbp import MgWfbpPlanner
from stretto.planners.single import SinglePlanner
from stretto.planners.wfbp import WfbpPlanner
from stretto.plugins import ClassRegistry

ENTRY_POINTS = "stretto.planners"
"""Group of entry points in which packages name their planners."""

_PLANNERS = ClassRegistry(
    ENTRY_POINTS,
    AbstractPlanner,  # type: ignore[type-abstract]
    (
        SinglePlanner,
        WfbpPlanner,
        DdpPlanner,
        HorovodPlanner,
        DearPlanner,
        MgWfbpPlanner,
        FusionPlanner,
        AscWfbpPlanner,
        LibraMPlanner,
        LibraPlanner,
        AiaccPlanner,
        JointPlanner,
        ExhaustivePlanner,
    ),
)

NAMES = tuple(name for name in _PLANNERS.own if name != ExhaustivePlanner.name)
"""stretto's planners to compare, simplest first; `get` accepts others too."""


def get(planner: str | AbstractPlanner, **options: Any) -> AbstractPlanner:
    """Return the planner of a name with its options; a planner is returned unchanged.

    Raises:
        SpecError: the planner or an option is unknown, or a planner that is made
            already is given options.
    """
    if isinstance(planner, AbstractPlanner):
        if options:
            raise SpecError(
                f"planner {planner.name} is an object, which has its options already, "
                f"got {', '.join(options)}: pass them to its constructor"
            )
        return planner
    known = options_of(planner)
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SpecError(f"planner {planner} has no option {option!r}; {has}")
    return _class_of(planner)(**options)


def options_of(name: str) -> tuple[str, ...]:
    """Return the names of a planner's options.

    Raises:
        SpecError: the planner is unknown.
    """
    parameters = inspect.signature(_class_of(name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _class_of(name: str) -> type[AbstractPlanner]:
    """Return the class of a planner, stretto's own before an installed one.

    Raises:
        SpecError: there is no such planner, or its package does not load.
    """
    found = _PLANNERS.find(name)
    if found is None:
        names = ", ".join(_PLANNERS.names())
        raise SpecError(
            f"planner must be one of {names}, got {name!r}", place=".planner"
        )
    return found
