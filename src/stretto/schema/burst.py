"""Layer profiles and burst plans: a model's layers measured, and the GPUs each gets.

The two files of burst parallelism (DeepPool) are ``layer_profile`` and ``burst_plan``.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stretto.errors import PlanMismatch, SpecError
from stretto.schema import codec, rules
from stretto.schema._convert import ADDED
from stretto.schema.burst_host import HostCosts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LATER = {ADDED: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """Times of one layer for one number of samples on one GPU."""

    samples: int

    forward_s: float

    backward_s: float

    def __post_init__(self) -> None:
        rules.at_least(".samples", self.samples, 1)
        rules.finite(".forward_s", self.forward_s)
        rules.finite(".backward_s", self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: its inputs, sizes and times."""

    name: str

    inputs: tuple[str, ...]
    """Layers whose output it reads; empty for the first layer."""

    parameter_bytes: int

    activation_bytes: int
    """Bytes of its output for one sample."""

    times: tuple[BatchTime, ...]
    """By ascending number of samples."""

    update_s: float = field(default=0.0, metadata=_LATER)
    """The optimizer's time for its parameters on one GPU, for any number of GPUs."""

    norms: int = field(default=0, metadata=_LATER)
    """Number of batch norms in it, whose statistics its GPUs exchange both ways."""

    def __post_init__(self) -> None:
        rules.not_empty(".name", self.name)
        rules.finite(".update_s", self.update_s)
        rules.at_least(".norms", self.norms, 0)
        rules.at_least(".parameter_bytes", self.parameter_bytes, 0)
        rules.at_least(".activation_bytes", self.activation_bytes, 0)
        if len(set(self.inputs)) < len(self.inputs):
            raise SpecError(
                f"inputs must not repeat a layer, got {', '.join(self.inputs)}",
                place=".inputs",
            )
        if not self.times:
            raise SpecError("a layer needs at least one time", place=".times")
        for i, time in enumerate(self.times):
            if i and time.samples <= self.times[i - 1].samples:
                raise SpecError(
                    f"samples must ascend, got {time.samples} after "
                    f"{self.times[i - 1].samples}",
                    place=f".times[{i}].samples",
                )

    def compute_s(self, samples: float) -> float:
        """Return forward, backward and update time for a number of samples on a GPU.

        Raises:
            SpecError: fewer or more samples than were profiled.
        """
        time = self.time_of(samples)
        return time[0] + time[1] + self.update_s

    def time_of(self, samples: float) -> tuple[float, float]:
        """Return forward and backward time for a number of samples on one GPU.

        Linear between the two nearest profiled numbers of samples, which is exact where
        a layer's time is start-up plus work. Times are never extrapolated beyond the
        profiled numbers.

        Raises:
            SpecError: fewer or more samples than were profiled.
        """
        times = self.times
        if not times[0].samples <= samples <= times[-1].samples:
            raise SpecError(
                f"layer {self.name!r} was profiled for {times[0].samples} to "
                f"{times[-1].samples} samples on a GPU, but {samples} are needed: "
                "profile it for that too, or choose another batch or number of GPUs",
                place=".times",
            )
        at = bisect_left(times, samples, key=lambda time: time.samples)
        high = times[at]
        if high.samples == samples:
            return high.forward_s, high.backward_s
        low = times[at - 1]
        ratio = (samples - low.samples) / (high.samples - low.samples)
        return (
            low.forward_s + ratio * (high.forward_s - low.forward_s),
            low.backward_s + ratio * (high.backward_s - low.backward_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """A rank's measured times of one layer during training."""

    layer: str

    samples: int
    """The rank's number of the step's samples."""

    forward_s: float

    backward_s: float

    def __post_init__(self) -> None:
        rules.not_empty(".layer", self.layer)
        rules.at_least(".samples", self.samples, 1)
        rules.finite(".forward_s", self.forward_s)
        rules.finite(".backward_s", self.backward_s)


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """A model's layers with their times by number of samples, on one device.

    ``layers`` are in an order in which they can run: each after its inputs.
    """

    name: str

    device: str

    layers: tuple[Layer, ...]

    provenance: dict[str, Any] = field(default_factory=dict)
    """Free-form: host, versions, repetitions, spread."""

    input_bytes: int = field(default=0, metadata=_LATER)
    """Bytes of the model's input for one sample."""

    whole: tuple[BatchTime, ...] = field(default=(), metadata=_LATER)
    """Times of the whole model, measured as one; empty if it was not measured."""

    outside_s: float = field(default=0.0, metadata=_LATER)
    """Time of a training step on one GPU beyond layers and updates: freeing gradients,
    the optimizer's own calls. Every rank pays it."""

    host: HostCosts | None = field(default=None, metadata=_LATER)
    """Costs that the ranks' hosts add; ``None`` if they were not measured."""

    def __post_init__(self) -> None:
        rules.at_least(".input_bytes", self.input_bytes, 0)
        rules.finite(".outside_s", self.outside_s)
        if not self.layers:
            raise SpecError("a profile needs at least one layer", place=".layers")
        seen: dict[str, int] = {}
        for i, layer in enumerate(self.layers):
            if layer.name in seen:
                raise SpecError(
                    f"name {layer.name!r} is a duplicate of layers[{seen[layer.name]}]",
                    place=f".layers[{i}].name",
                )
            for j, name in enumerate(layer.inputs):
                if name not in seen:
                    raise SpecError(
                        f"input {name!r} must be a layer that comes before it",
                        place=f".layers[{i}].inputs[{j}]",
                    )
            seen[layer.name] = i

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @cached_property
    def digest(self) -> str:
        """Digest of names, edges and sizes; times do not count."""
        return digest_of(
            (layer.name, layer.inputs, layer.parameter_bytes, layer.activation_bytes)
            for layer in self.layers
        )

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        """Return the profile in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the profile atomically."""
        codec.save(path, self)


def digest_of(layers: Iterable[tuple[str, tuple[str, ...], int, int]]) -> str:
    """Return a digest of the layers.

    Each row is a layer's name, inputs, parameter bytes and activation bytes.
    """
    sha = hashlib.sha256()
    for name, inputs, parameter_bytes, activation_bytes in layers:
        sizes = f"{parameter_bytes}|{activation_bytes}"
        sha.update("\0".join((sizes, name, *inputs, "")).encode())
    return f"sha256:{sha.hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGpus:
    """The GPUs of one layer: ``gpus`` of them from ``first_gpu`` on."""

    layer: str

    gpus: int

    first_gpu: int
    """0 except in a branch that runs on its own GPUs, beside other branches."""

    def __post_init__(self) -> None:
        rules.not_empty(".layer", self.layer)
        rules.at_least(".gpus", self.gpus, 1)
        rules.at_least(".first_gpu", self.first_gpu, 0)

    @property
    def ranks(self) -> range:
        """Ranks that run the layer; they hold the samples in this order."""
        return range(self.first_gpu, self.first_gpu + self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPrediction:
    """Predicted times of a burst plan."""

    iteration_s: float

    gpu_s: float
    """Active GPU time of a step: each layer's time times its GPUs."""

    amplification: float
    """``gpu_s`` relative to the computation of a step on one GPU."""

    max_amplification: float
    """The largest amplification of a single layer."""

    data_parallel_s: float
    """Step time with every layer on the largest number of GPUs allowed."""

    single_width: int | None = field(default=None, metadata=_LATER)
    """The best number of GPUs if every layer must have the same."""

    single_width_s: float | None = field(default=None, metadata=_LATER)
    """Step time with ``same_width_gpus`` for every layer."""

    idle_gpu_s: float | None = field(default=None, metadata=_LATER)
    """GPU time of a step in which the plan's GPUs are idle: everything except
    layers, updates and, if it is counted after backward, synchronization."""

    def __post_init__(self) -> None:
        for name in (
            "iteration_s",
            "gpu_s",
            "amplification",
            "max_amplification",
            "data_parallel_s",
        ):
            rules.finite(f".{name}", getattr(self, name))
        if self.single_width is not None:
            rules.at_least(".single_width", self.single_width, 1)
        for name in ("single_width_s", "idle_gpu_s"):
            if getattr(self, name) is not None:
                rules.finite(f".{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """The number of GPUs of each layer of a profile, in the profile's order."""

    profile_digest: str

    gpus: int
    """Number of GPUs that the plan may use."""

    batch: int
    """Samples of a step over all GPUs."""

    amplification_limit: float | None
    """Amplification limit of each layer; ``None``: no limit."""

    layers: tuple[LayerGpus, ...]

    predicted: BurstPrediction | None = None

    def __post_init__(self) -> None:
        rules.at_least(".gpus", self.gpus, 1)
        rules.at_least(".batch", self.batch, 1)
        if self.amplification_limit is not None:
            rules.finite(".amplification_limit", self.amplification_limit)
            if self.amplification_limit < 1:
                raise SpecError(
                    "amplification_limit must be >= 1, GPU time of one GPU, got "
                    f"{self.amplification_limit:g}",
                    place=".amplification_limit",
                )
        if not self.layers:
            raise SpecError("a plan needs at least one layer", place=".layers")
        seen: dict[str, int] = {}
        for i, entry in enumerate(self.layers):
            if entry.layer in seen:
                raise SpecError(
                    f"layer {entry.layer!r} is a duplicate of "
                    f"layers[{seen[entry.layer]}]",
                    place=f".layers[{i}].layer",
                )
            seen[entry.layer] = i
            if entry.first_gpu + entry.gpus > self.gpus:
                raise SpecError(
                    f"first_gpu + gpus must be <= {self.gpus}, the plan's GPUs, got "
                    f"{entry.first_gpu} + {entry.gpus}",
                    place=f".layers[{i}].gpus",
                )

    def check_matches(self, profile: LayerProfile) -> None:
        """Require that the plan was made for this profile.

        Raises:
            PlanMismatch: naming what differs.
        """
        names = [layer.name for layer in profile.layers]
        if (
            self.profile_digest != profile.digest
            or [entry.layer for entry in self.layers] != names
        ):
            raise PlanMismatch(
                f"the plan was made for a profile with digest {self.profile_digest}, "
                f"but {profile.name!r} has {profile.digest}: layers, their inputs or "
                "sizes differ. Run `stretto burst plan` again."
            )

    @classmethod
    def load(cls, path: str | Path) -> BurstPlan:
        """Return the plan in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the plan atomically."""
        codec.save(path, self)
