"""The plan: the only thing that planning passes to the runtime."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.errors import PlanMismatch, SpecError
from stretto.schema import codec, rules
from stretto.schema._convert import ADDED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stretto.schema.workload import Workload

OVERLAPS = ("none", "backward", "forward", "halves")
"""Where communication runs: after backward, during it, also during the next forward, or
in two halves as in DeAR, one during backward and one during the next forward. The
runtime refuses the last: it is simulated to compare with."""
ALGORITHMS = (
    "ring",
    "halving_doubling",
    "tree",
    "hierarchical",
    "two_level_rails",
    "in_network",
)
MAX_LANES = 2**16
MAX_SLICES = 2**17
"""A larger number is a corrupt file; reading a plan must not exhaust memory."""

WIRE_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
)
"""Gradient types that can be averaged over ranks."""
NARROWER = {"float64": ("float32",), "float32": ("float16", "bfloat16")}
"""Narrower types in which gradients of a type may be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors sent by one collective, or by ``slices`` collectives at once."""

    tensors: tuple[str, ...]

    lane: int = 0
    """Lane of the first slice; slice ``i`` runs on lane ``(lane + i) % lanes``."""

    slices: int = 1
    """Parts of nearly equal size, each its own collective."""

    resource: int | None = None
    """CTAs or threads a collective may take; ``None``: the backend's default."""

    algorithm: str = "ring"

    wire_dtype: str
    """Type on the wire; if it equals the gradients' own type, nothing is converted.

    There is no default, because none is right for gradients of every type.
    """

    def __post_init__(self) -> None:
        if not self.tensors:
            raise SpecError("a bucket needs at least one tensor", place=".tensors")
        rules.at_least(".lane", self.lane, 0)
        rules.at_least(".slices", self.slices, 1)
        rules.at_most(".slices", self.slices, MAX_SLICES)
        if self.resource is not None:
            rules.at_least(".resource", self.resource, 1)
        rules.one_of(".algorithm", self.algorithm, ALGORITHMS)
        rules.one_of(".wire_dtype", self.wire_dtype, WIRE_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted times of a plan."""

    iteration_s: float

    backward_s: float
    """From the start of backward to the end of the last collective or of backward."""

    exposed_communication_s: float
    """Part of ``backward_s`` in which no computation runs."""

    lower_bound_s: float
    """No plan's step can be shorter under the same model."""

    gap: float
    """``iteration_s / lower_bound_s - 1``."""

    bound_scope: str = field(default="", metadata={ADDED: True})
    """The plans that the bound covers, as text that continues "no plan with"."""

    def __post_init__(self) -> None:
        for name in (
            "iteration_s",
            "backward_s",
            "exposed_communication_s",
            "lower_bound_s",
        ):
            rules.finite(f".{name}", getattr(self, name))
        rules.finite(".gap", self.gap, above=-1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Buckets in order of readiness on ``lanes`` lanes.

    They launch in that order, or in ``launch``'s; a bucket starts when its tensors and
    those of the buckets before it are ready and its lane is free.
    """

    planner: str

    workload_digest: str

    ranks: int

    overlap: str

    lanes: int

    buckets: tuple[Bucket, ...]

    predicted: Prediction | None = None

    launch: tuple[int, ...] = field(default=(), metadata={ADDED: True})
    """Indices of the buckets in the order in which they launch; empty: as listed.

    Only with overlap ``forward``, where buckets that the next forward needs first may
    launch before others that became ready earlier.
    """

    def __post_init__(self) -> None:
        rules.at_least(".ranks", self.ranks, 1)
        rules.one_of(".overlap", self.overlap, OVERLAPS)
        rules.at_least(".lanes", self.lanes, 1)
        rules.at_most(".lanes", self.lanes, MAX_LANES)
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
                        f"tensor {name!r} is in buckets[{seen[name]}] too; every "
                        "tensor must be in exactly one bucket",
                        place=f".buckets[{i}].tensors[{j}]",
                    )
                seen[name] = i
        self._check_launch()

    def _check_launch(self) -> None:
        if not self.launch:
            return
        if self.overlap != "forward":
            raise SpecError(
                f"overlap {self.overlap!r} launches buckets as listed, got a launch "
                "order: leave it out, or use overlap 'forward'",
                place=".launch",
            )
        number = len(self.buckets)
        if sorted(self.launch) != list(range(number)):
            raise SpecError(
                f"launch must have each index of the {number} buckets, 0 to "
                f"{number - 1}, once, got {_shortened(self.launch)}",
                place=".launch",
            )

    @property
    def launch_order(self) -> tuple[int, ...]:
        """Indices of the buckets in the order in which they launch."""
        return self.launch or tuple(range(len(self.buckets)))

    @property
    def digest(self) -> str:
        """Digest of what the plan makes the runtime do, without its prediction."""
        sha = hashlib.sha256()
        sha.update(f"{self.workload_digest}|{self.ranks}|{self.overlap}".encode())
        sha.update(f"|{self.lanes}\n".encode())
        for b in self.buckets:
            line = f"{b.lane}|{b.slices}|{b.resource}|{b.algorithm}|{b.wire_dtype}"
            sha.update("\0".join((line, *b.tensors, "")).encode())
        if self.launch_order != tuple(range(len(self.buckets))):
            sha.update(f"launch|{self.launch}".encode())
        return f"sha256:{sha.hexdigest()}"

    def check_matches(self, workload: Workload) -> None:
        """Require that the plan was made for this workload.

        Raises:
            PlanMismatch: naming the first tensor that differs.
        """
        names = [name for bucket in self.buckets for name in bucket.tensors]
        known = {tensor.name for tensor in workload.tensors}
        for i, bucket in enumerate(self.buckets):
            for name in bucket.tensors:
                if name not in known:
                    raise PlanMismatch(
                        f"bucket {i} names tensor {name!r}, which is missing from "
                        f"workload {workload.name!r}: the plan was made for another "
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
                f"but {workload.name!r} has {workload.digest}: sizes or types differ. "
                "Run `stretto profile` and plan again."
            )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the plan atomically."""
        codec.save(path, self)


def _shortened(numbers: Sequence[int]) -> str:
    """Return the first numbers of a list as text."""
    shown = ", ".join(map(str, numbers[:16]))
    return f"[{shown}, ...] ({len(numbers)})" if len(numbers) > 16 else f"[{shown}]"


def slice_bounds(elements: int, slices: int) -> tuple[tuple[int, int], ...]:
    """Return the element ranges of a bucket's slices; sizes differ by at most one.

    Ranges are half-open. Empty ones are left out, so a bucket of fewer elements than
    slices yields fewer. Predictor and runtime both call this function.
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
