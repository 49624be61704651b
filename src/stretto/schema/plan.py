"""The decision: the only thing that passes from thinking to doing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.errors import PlanMismatch, SpecError
from stretto.schema import _rules, codec
from stretto.schema._convert import ADDED

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.schema.workload import Workload

OVERLAPS = ("none", "backward", "forward")
ALGORITHMS = (
    "ring",
    "halving_doubling",
    "tree",
    "hierarchical",
    "two_level_rails",
    "in_network",
)
MOST_LANES = 2**16
MOST_SLICES = 2**17
"""More is a broken file: reading a plan must not take the machine's memory."""

WIRE_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
)
"""Types of gradients that can be averaged over ranks."""
NARROWER = {"float64": ("float32",), "float32": ("float16", "bfloat16")}
"""Narrower types in which gradients of a type may travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors sent by one collective, or by ``slices`` collectives at once."""

    tensors: tuple[str, ...]

    lane: int = 0
    """Lane of the first slice; slice ``i`` runs on lane ``(lane + i) % lanes``."""

    slices: int = 1
    """Parts of nearly equal size, each its own collective."""

    resource: int | None = None
    """CTAs or threads a collective may take; ``None``: the backend's own choice."""

    algorithm: str = "ring"

    wire_dtype: str
    """Type on the wire; equal to the gradients' own type: nothing is converted.

    It has no default, for none is right for gradients of every type.
    """

    def __post_init__(self) -> None:
        if not self.tensors:
            raise SpecError("a bucket needs at least one tensor", place=".tensors")
        _rules.at_least(".lane", self.lane, 0)
        _rules.at_least(".slices", self.slices, 1)
        _rules.at_most(".slices", self.slices, MOST_SLICES)
        if self.resource is not None:
            _rules.at_least(".resource", self.resource, 1)
        _rules.one_of(".algorithm", self.algorithm, ALGORITHMS)
        _rules.one_of(".wire_dtype", self.wire_dtype, WIRE_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is predicted to do."""

    iteration_s: float

    backward_s: float
    """From the start of backward to the end of the last collective or of backward."""

    exposed_communication_s: float
    """The part of ``backward_s`` in which no computation runs."""

    lower_bound_s: float
    """No plan's iteration can be shorter under the same model."""

    gap: float
    """``iteration_s / lower_bound_s - 1``."""

    bound_scope: str = field(default="", metadata={ADDED: True})
    """The plans that the bound covers, in words that continue "no plan with"."""

    def __post_init__(self) -> None:
        for name in (
            "iteration_s",
            "backward_s",
            "exposed_communication_s",
            "lower_bound_s",
        ):
            _rules.finite(f".{name}", getattr(self, name))
        _rules.finite(".gap", self.gap, above=-1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Buckets in launch order on ``lanes`` lanes.

    A bucket starts when its tensors are ready and its lane is free.
    """

    planner: str

    workload_digest: str

    ranks: int

    overlap: str

    lanes: int

    buckets: tuple[Bucket, ...]

    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        _rules.at_least(".ranks", self.ranks, 1)
        _rules.one_of(".overlap", self.overlap, OVERLAPS)
        _rules.at_least(".lanes", self.lanes, 1)
        _rules.at_most(".lanes", self.lanes, MOST_LANES)
        if not self.buckets:
            raise SpecError("a plan needs at least one bucket", place=".buckets")
        seen: dict[str, int] = {}
        for i, bucket in enumerate(self.buckets):
            if bucket.lane >= self.lanes:
                raise SpecError(
                    f"lane must be < lanes ({self.lanes}), got {bucket.lane}",
                    place=f".buckets[{i}].lane",
                )
            for j, name in enumerate(bucket.tensors):
                if name in seen:
                    raise SpecError(
                        f"tensor {name!r} stands in buckets[{seen[name]}] too; every "
                        "tensor must stand exactly once",
                        place=f".buckets[{i}].tensors[{j}]",
                    )
                seen[name] = i

    @property
    def digest(self) -> str:
        """A digest of what the plan tells the runtime to do, not of its prediction."""
        sha = hashlib.sha256()
        sha.update(f"{self.workload_digest}|{self.ranks}|{self.overlap}".encode())
        sha.update(f"|{self.lanes}\n".encode())
        for b in self.buckets:
            line = f"{b.lane}|{b.slices}|{b.resource}|{b.algorithm}|{b.wire_dtype}"
            sha.update("\0".join((line, *b.tensors, "")).encode())
        return f"sha256:{sha.hexdigest()}"

    def check_matches(self, workload: Workload) -> None:
        """Requires that the plan was made for this workload.

        Raises:
            PlanMismatch: naming the first tensor that differs.
        """
        names = [name for bucket in self.buckets for name in bucket.tensors]
        known = {tensor.name for tensor in workload.tensors}
        for i, bucket in enumerate(self.buckets):
            for name in bucket.tensors:
                if name not in known:
                    raise PlanMismatch(
                        f"bucket {i} names tensor {name!r}, which workload "
                        f"{workload.name!r} lacks: the plan was made for another "
                        "model. Run `stretto profile` and plan again."
                    )
        for missing in known.difference(names):
            raise PlanMismatch(
                f"no bucket holds tensor {missing!r} of workload {workload.name!r}: "
                "the plan was made for another model. "
                "Run `stretto profile` and plan again."
            )
        if self.workload_digest not in (workload.digest, workload.ordered_digest):
            raise PlanMismatch(
                f"the plan was made for a workload with digest {self.workload_digest}, "
                f"{workload.name!r} has {workload.digest}: sizes or types differ. "
                "Run `stretto profile` and plan again."
            )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Writes the plan atomically."""
        codec.save(path, self)


def slice_bounds(elements: int, slices: int) -> tuple[tuple[int, int], ...]:
    """Half-open element ranges of a bucket's slices, sizes differing by one at most.

    Empty ranges are left out, so a bucket of fewer elements than slices yields fewer.
    The one place that decides this: predictor and runtime both ask here.
    """
    each, extra = divmod(elements, slices)
    bounds: list[tuple[int, int]] = []
    start = 0
    for i in range(slices):
        end = start + each + (1 if i < extra else 0)
        if end > start:
            bounds.append((start, end))
        start = end
    return tuple(bounds)
