"""Families of plans that a lower bound covers, and the bound over each.

Called by planners, which print what their bound covers, and by the tuner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.sim.bounds import lower_bound
from stretto.sim.forward_bounds import forward_bound_s, halves_bound_s

if TYPE_CHECKING:
    from stretto.schema import Cluster, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundScope:
    """A family of plans: anything it leaves open may be chosen freely."""

    algorithms: tuple[str, ...] = ("ring",)

    forward: bool = False
    """Whether plans may overlap all-reduces with the next forward too."""

    halves: bool = False
    """Whether plans send halves of all-reduces during backward and the next forward."""

    max_lanes: int | None = None
    """The largest number of lanes of a plan; ``None``: any number."""

    resources: tuple[int, ...] | None = None
    """Levels of resource that plans may use; ``None``: all of the cluster's."""

    wire_dtype: str | None = None
    """The type in which gradients are sent; ``None``: their own."""

    def bound_s(
        self, workload: Workload, cluster: Cluster, *, certificate: str = "fast"
    ) -> float:
        """Return a time that no plan of this family can beat.

        ``workload`` has the gradients as they are sent. ``certificate`` is as in
        `lower_bound`.

        Raises:
            SpecError: the certificate is unknown.
        """
        cluster = self._limited(cluster)
        bound_s = lower_bound(
            workload,
            cluster,
            algorithms=self.algorithms,
            certificate=certificate,
            max_lanes=self.max_lanes,
        ).value_s
        algorithms = self.algorithms
        if self.forward:
            other_s = forward_bound_s(
                workload, cluster, algorithms=algorithms, max_lanes=self.max_lanes
            )
            bound_s = min(bound_s, other_s)
        if self.halves:
            other_s = halves_bound_s(workload, cluster, algorithms=algorithms)
            bound_s = min(bound_s, other_s)
        return bound_s

    def proved(
        self, workload: Workload, cluster: Cluster, *, certificate: str = "fast"
    ) -> tuple[float, BoundScope]:
        """Return the bound and the widest scope for which it holds as it is.

        Raises:
            SpecError: the certificate is unknown.
        """
        bound_s = self.bound_s(workload, cluster, certificate=certificate)
        scope = self
        if certificate == "fast":
            for other in (
                replace(self, resources=None),
                replace(self, max_lanes=None),
                replace(self, resources=None, max_lanes=None),
            ):
                if other.bound_s(workload, cluster) == bound_s:
                    scope = other
        return bound_s, scope

    def text(self, cluster: Cluster) -> str:
        """Return the family in words that continue "no plan with"."""
        names = [name.replace("_", "-") for name in self.algorithms]
        text = names[0]
        if len(names) > 1:
            text = f"{', '.join(names[:-1])} or {names[-1]}"
        text += " all-reduces overlapped with backward"
        if self.forward:
            text += " or the next forward"
        if self.halves:
            text += " or in halves with backward and the next forward"
        if self.max_lanes is not None:
            lanes = "lane" if self.max_lanes == 1 else "lanes"
            text += f" on at most {self.max_lanes} {lanes}"
        levels = cluster.contention.resources if cluster.contention else ()
        if self.resources is not None and set(self.resources) != set(levels):
            text += f" with resource {' or '.join(map(str, self.resources))}"
        if self.wire_dtype is not None:
            text += f" in {self.wire_dtype}"
        return text

    def _limited(self, cluster: Cluster) -> Cluster:
        """Return the cluster with only the resource levels that plans may use."""
        contention = cluster.contention
        if contention is None or self.resources is None:
            return cluster
        limited = replace(contention, resources=self.resources)
        return replace(cluster, contention=limited)
