"""The choices open to a joint search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost import collective_cost
from stretto.errors import SpecError
from stretto.sim.scope import BoundScope
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners.base import Draft
    from stretto.schema import Cluster, Workload

DIMS = ("fusion", "lanes", "slices", "resource", "algorithm", "forward")
"""All dimensions that can be chosen."""

RUNNABLE_DIMS = ("fusion", "lanes", "slices")
"""Dimensions searched by default: the runtime applies them to every script.

The runtime executes ``forward`` too, and of ``algorithm`` rings and two levels.
"""

ALGORITHMS = ("ring", "halving_doubling", "tree", "hierarchical")
"""The choices of ``algorithm``: those that need no special network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSpace:
    """The choices open to a search on one cluster."""

    fusion: bool = True

    max_lanes: int = 1

    slices: bool = True

    resources: tuple[int | None, ...] = (None,)

    algorithms: tuple[str, ...] = ("ring",)

    forward: bool = False
    """Whether all-reduces may extend into the next forward, in any launch order."""

    @property
    def mixed(self) -> bool:
        """Whether buckets may differ from a ring with the default resource."""
        return self.resources != (None,) or self.algorithms != ("ring",)

    def holds(self, draft: Draft) -> bool:
        """Return whether a draft stays within the open choices."""
        return (
            draft.lanes <= self.max_lanes
            and (self.slices or max(draft.slices) == 1)
            and set(draft.resources).issubset((None, *self.resources))
            and set(draft.algorithms).issubset(self.algorithms)
            and (draft.overlap in ("none", "backward") or self._extends(draft))
        )

    def _extends(self, draft: Draft) -> bool:
        return self.forward and draft.overlap == "forward"


def space_of(
    dims: Sequence[str],
    max_lanes: int,
    workload: Workload,
    cluster: Cluster,
    algorithms: Sequence[str] = ALGORITHMS,
) -> JointSpace:
    """Return the space of some dimensions on a cluster, without useless choices.

    ``algorithms`` are the choices of the dimension ``algorithm``.

    Left out: algorithms that another one beats in start-up and in bytes, and levels of
    resource that send no faster than a lower one.
    """
    resources: tuple[int | None, ...] = (None,)
    useful: tuple[str, ...] = ("ring",)
    if "resource" in dims and cluster.contention is not None:
        resources = _useful_resources(workload, cluster)
    if "algorithm" in dims and cluster.ranks > 1:
        useful = _useful_algorithms(cluster, algorithms)
    return JointSpace(
        fusion="fusion" in dims,
        max_lanes=max_lanes if "lanes" in dims else 1,
        slices="slices" in dims,
        resources=resources,
        algorithms=useful,
        forward="forward" in dims and cluster.ranks > 1,
    )


def open_scope(
    dims: Sequence[str],
    max_lanes: int,
    cluster: Cluster,
    algorithms: Sequence[str] = ALGORITHMS,
) -> BoundScope:
    """Return the plans of some dimensions on a cluster that a bound has to cover.

    Choices that `space_of` leaves out as useless count as open.
    """
    open_ones: tuple[str, ...] = ("ring",)
    if "algorithm" in dims and cluster.ranks > 1:
        open_ones = _open_algorithms(cluster, algorithms)
    contention = cluster.contention
    levels = contention.resources if contention is not None else None
    if levels is not None and "resource" not in dims:
        levels = levels[:1]
    return BoundScope(
        algorithms=open_ones,
        forward="forward" in dims and cluster.ranks > 1,
        max_lanes=max_lanes if "lanes" in dims else 1,
        resources=levels,
    )


def checked_dims(planner: str, dims: str | Sequence[str]) -> tuple[str, ...]:
    """Return dimensions from their names, in the order of `DIMS`; ``"all"``: all.

    Raises:
        SpecError: a name is unknown.
    """
    if dims == "all":
        return DIMS
    names = tuple(dims.split(",")) if isinstance(dims, str) else tuple(dims)
    for name in names:
        if name not in DIMS:
            raise SpecError(
                f"planner {planner}: dims must be all or some of {', '.join(DIMS)}, "
                f"got {name!r}"
            )
    return tuple(name for name in DIMS if name in names)


def checked_algorithms(
    planner: str, algorithms: str | Sequence[str] | None
) -> tuple[str, ...]:
    """Return algorithms from their names, in the order of `ALGORITHMS`; all of `None`.

    Raises:
        SpecError: a name is unknown, or ``ring`` is missing.
    """
    if algorithms is None:
        return ALGORITHMS
    names = algorithms.split(",") if isinstance(algorithms, str) else tuple(algorithms)
    for name in names:
        if name not in ALGORITHMS:
            raise SpecError(
                f"planner {planner}: algorithms must be some of "
                f"{', '.join(ALGORITHMS)}, got {name!r}"
            )
    if "ring" not in names:
        raise SpecError(
            f"planner {planner}: algorithms must include ring, got {', '.join(names)}"
        )
    return tuple(name for name in ALGORITHMS if name in names)


def with_algorithm(dims: tuple[str, ...], algorithms: object) -> tuple[str, ...]:
    """Return ``dims`` with ``algorithm``, which is open where algorithms are given."""
    if algorithms is None:
        return dims
    return tuple(name for name in DIMS if name in dims or name == "algorithm")


def _open_algorithms(cluster: Cluster, algorithms: Sequence[str]) -> tuple[str, ...]:
    two_levels = cluster.ranks_per_host > 1 and cluster.hosts > 1
    return tuple(name for name in algorithms if name != "hierarchical" or two_levels)


def _useful_algorithms(cluster: Cluster, algorithms: Sequence[str]) -> tuple[str, ...]:
    costs = {}
    for name in _open_algorithms(cluster, algorithms):
        cost = collective_cost(cluster, name)
        costs[name] = (cost.startup_s, cost.startup_s_per_byte, cost.wire_factor)
    return _undominated(costs) or ("ring",)


def _useful_resources(workload: Workload, cluster: Cluster) -> tuple[int | None, ...]:
    contention = cluster.contention
    if contention is None:
        return (None,)
    model = StepModel(workload, cluster)
    costs = {
        str(level): (float(level), -model.caps(level)[0], -model.caps(level)[1])
        for level in contention.resources
    }
    return tuple(int(name) for name in _undominated(costs))


def _undominated(costs: dict[str, tuple[float, float, float]]) -> tuple[str, ...]:
    """Return the names that no other one beats; of equals the first."""
    kept: list[str] = []
    for name, mine in costs.items():
        beaten = any(
            all(a <= b for a, b in zip(theirs, mine, strict=True))
            and (theirs != mine or other in kept)
            for other, theirs in costs.items()
            if other != name
        )
        if not beaten:
            kept.append(name)
    return tuple(kept)
