"""A model's measured tensors and times."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema import codec, rules

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter's gradient."""

    name: str

    bytes: int
    """Size of the gradient in bytes, a whole number of elements of ``dtype``."""

    dtype: str

    ready_s: float
    """When the gradient is ready, from the start of backward, without communication."""

    needed_s: float
    """When forward first uses the parameter, from the start of forward."""

    def __post_init__(self) -> None:
        rules.not_empty(".name", self.name)
        rules.one_of(".dtype", self.dtype, rules.DTYPE_BYTES)
        rules.at_least(".bytes", self.bytes, 0)
        width = rules.DTYPE_BYTES[self.dtype]
        if self.bytes % width:
            raise SpecError(
                f"bytes must be a multiple of {width}, the width of {self.dtype}, "
                f"got {self.bytes}",
                place=".bytes",
            )
        rules.finite(".ready_s", self.ready_s)
        rules.finite(".needed_s", self.needed_s)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's tensors with their sizes and times, on one rank.

    ``tensors`` are in the order in which their gradients become ready.
    """

    name: str

    framework: str

    device: str

    batch_per_rank: int

    forward_s: float
    """Part of a step that is not backward: forward and, if it was measured on a running
    job, the optimizer and the input pipeline."""

    backward_s: float
    """Duration of backward without communication."""

    tensors: tuple[TensorSpec, ...]

    provenance: dict[str, Any] = field(default_factory=dict)
    """Free-form: host, versions, repetitions, spread."""

    def __post_init__(self) -> None:
        rules.at_least(".batch_per_rank", self.batch_per_rank, 1)
        rules.finite(".forward_s", self.forward_s)
        rules.finite(".backward_s", self.backward_s)
        if not self.tensors:
            raise SpecError("a workload needs at least one tensor", place=".tensors")
        seen: dict[str, int] = {}
        last_ready_s = 0.0
        for i, tensor in enumerate(self.tensors):
            place = f".tensors[{i}]"
            if tensor.name in seen:
                raise SpecError(
                    f"name {tensor.name!r} is a duplicate of "
                    f"tensors[{seen[tensor.name]}]; every tensor must appear once",
                    place=f"{place}.name",
                )
            seen[tensor.name] = i
            if tensor.ready_s < last_ready_s:
                raise SpecError(
                    f"tensors must be in the order of ready_s, got "
                    f"{tensor.ready_s:g} after {last_ready_s:g}",
                    place=f"{place}.ready_s",
                )
            last_ready_s = tensor.ready_s
            if tensor.ready_s > self.backward_s:
                raise SpecError(
                    f"ready_s must be <= backward_s ({self.backward_s:g}), "
                    f"got {tensor.ready_s:g}",
                    place=f"{place}.ready_s",
                )
            if tensor.needed_s > self.forward_s:
                raise SpecError(
                    f"needed_s must be <= forward_s ({self.forward_s:g}), "
                    f"got {tensor.needed_s:g}",
                    place=f"{place}.needed_s",
                )

    @cached_property
    def digest(self) -> str:
        """Digest of tensor names, sizes and dtypes, not of their order or times.

        The order in which gradients become ready may differ from run to run, and a
        plan stays valid when it does.
        """
        return model_digest((t.name, t.bytes, t.dtype) for t in self.tensors)

    @property
    def ordered_digest(self) -> str:
        """Digest used by plans of version 0.1, which also covers the order."""
        return tensors_digest((t.name, t.bytes, t.dtype) for t in self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(tensor.bytes for tensor in self.tensors)

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Return the workload in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the workload atomically."""
        codec.save(path, self)


def model_digest(rows: Any) -> str:
    """Return ``sha256:...`` over (name, bytes, dtype) rows, in any order."""
    return tensors_digest(sorted(rows))


def tensors_digest(rows: Any) -> str:
    """Return ``sha256:...`` over (name, bytes, dtype) rows in their order."""
    sha = hashlib.sha256()
    for name, size_bytes, dtype in rows:
        sha.update(f"{name}\0{size_bytes}\0{dtype}\n".encode())
    return f"sha256:{sha.hexdigest()}"
