r"""Workloads with computed times: a model's layers by roofline, without a measurement.

A layer's forward takes

$t = \max\left(\frac{2 \cdot MAC \cdot b}{e P}, \frac{bytes}{0.8\,B}\right) + 5\,\mu s$

with $b$ samples, $P$ the device's peak, $e$ the share of it that is reached, and $B$
the memory's rate; ``bytes`` counts what the layer reads and writes, including
parameters. Backward takes twice as long. One factor each for forward and backward then
scales all layers, so that their sums match a measured or given time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.schema import TensorSpec, Workload
from stretto.zoo.graph import ELEMENT_BYTES
from stretto.zoo.models import model

if TYPE_CHECKING:
    from stretto.zoo.graph import ModelGraph

_MEMORY_SHARE = 0.8
_LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineDevice:
    """Figures of a device for the roofline."""

    name: str

    peak_flops: float
    """Operations per second in float32."""

    memory_bytes_per_s: float

    reached: float = 0.5
    """The share of the peak that large convolutions and products reach."""


RTX_2080TI = RooflineDevice(
    name="RTX 2080 Ti", peak_flops=13.45e12, memory_bytes_per_s=616e9
)
V100 = RooflineDevice(name="V100", peak_flops=15.7e12, memory_bytes_per_s=900e9)
A100 = RooflineDevice(name="A100", peak_flops=19.5e12, memory_bytes_per_s=1555e9)

DEVICES = {"2080ti": RTX_2080TI, "v100": V100, "a100": A100}


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A published step time on one device, which scales the roofline."""

    model: str

    device: str
    """One of ``DEVICES``."""

    batch: int

    forward_s: float

    backward_s: float

    source: str


def _anchor(name: str, device: str, batch: int, step_s: float, source: str) -> Anchor:
    """Return a step time of which one third is assumed to be forward."""
    return Anchor(
        model=name,
        device=device,
        batch=batch,
        forward_s=step_s / 3,
        backward_s=2 * step_s / 3,
        source=source,
    )


_TABLE_V = "from ASC-WFBP Tables IV and V: S * iteration / 32; forward one third"
ANCHORS = (
    Anchor(
        model="resnet152",
        device="2080ti",
        batch=32,
        forward_s=0.091,
        backward_s=0.182,
        source="ASC-WFBP section VI",
    ),
    _anchor("densenet201", "2080ti", 32, 0.2188, _TABLE_V),
    _anchor("inception-v4", "2080ti", 32, 0.1897, _TABLE_V),
    _anchor("bert-base", "2080ti", 64, 0.3061, _TABLE_V),
    _anchor(
        "resnet50", "2080ti", 64, 0.2529, "published 2080 Ti time; forward one third"
    ),
    _anchor(
        "bert-large", "2080ti", 8, 0.1633, "published 2080 Ti time; forward one third"
    ),
    _anchor("resnet50", "v100", 64, 64 / 370, "370 images/s; forward one third"),
    _anchor("vgg16", "v100", 64, 64 / 236, "assumed 236 images/s; forward one third"),
)
"""Single-device times, each model's most used first."""


def anchor(name: str, device: str | None = None) -> Anchor | None:
    """Return the published time of a model, on a given device or any."""
    for known in ANCHORS:
        if known.model == name and device in (None, known.device):
            return known
    return None


def layer_times_s(
    graph: ModelGraph, batch: int, device: RooflineDevice
) -> tuple[float, ...]:
    """Return each layer's forward by the roofline, for ``batch`` samples."""
    operations_per_s = device.reached * device.peak_flops
    bytes_per_s = _MEMORY_SHARE * device.memory_bytes_per_s
    times = []
    for layer in graph.layers:
        moved = batch * (layer.input_elements + layer.output_elements)
        moved_bytes = ELEMENT_BYTES * moved + layer.parameter_bytes
        if layer.kind == "embedding":
            moved_bytes = 2 * batch * layer.activation_bytes  # only the rows it reads
        computing_s = 2 * layer.macs * batch / operations_per_s
        times.append(max(computing_s, moved_bytes / bytes_per_s) + _LAUNCH_S)
    return tuple(times)


def workload(
    name: str,
    *,
    size: int | None = None,
    batch: int | None = None,
    forward_s: float | None = None,
    backward_s: float | None = None,
    device: str | None = None,
) -> Workload:
    """Return a model of the zoo as a workload, its times by roofline.

    Args:
        name: one of `MODELS`.
        size: height and width of images or tokens of sequences; ``None``: the default.
        batch: samples on a rank; ``None``: that of a published time, else 32.
        forward_s: time of forward; with ``backward_s`` it scales the roofline.
        backward_s: time of backward.
        device: one of `DEVICES`; ``None``: that of a published time, else ``v100``.

    Without ``forward_s`` and ``backward_s``, a published time for this model and device
    scales the roofline if there is one. For other batches the published time is scaled
    like the roofline's own times.

    Raises:
        SpecError: an argument is invalid, or only one time is given.
    """
    graph = model(name, size)
    if (forward_s is None) != (backward_s is None):
        raise SpecError("give both of forward_s and backward_s, or neither")
    if batch is not None and batch < 1:
        raise SpecError(f"batch must be >= 1, got {batch}")
    if device is not None and device not in DEVICES:
        raise SpecError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    known = anchor(name, device)
    place = device or (known.device if known else "v100")
    samples = batch or (known.batch if known else 32)
    times = layer_times_s(graph, samples, DEVICES[place])
    if forward_s is not None and backward_s is not None:
        source = "given"
    elif known is not None:
        usual = sum(layer_times_s(model(name), known.batch, DEVICES[place]))
        scale = sum(times) / usual
        forward_s, backward_s = scale * known.forward_s, scale * known.backward_s
        source = known.source
    else:
        forward_s, backward_s = sum(times), 2 * sum(times)
        source = f"roofline at {DEVICES[place].reached:.0%} of the peak"
    return Workload(
        name=name,
        framework="none",
        device=DEVICES[place].name,
        batch_per_rank=samples,
        forward_s=forward_s,
        backward_s=backward_s,
        tensors=_tensors(graph, times, forward_s, backward_s),
        provenance={
            "made_from": "architecture definition; layer times by roofline",
            "sample": graph.sample,
            "times": source,
            "parameters": graph.elements,
            "macs_per_sample": graph.macs,
        },
    )


def _tensors(
    graph: ModelGraph, times: tuple[float, ...], forward_s: float, backward_s: float
) -> tuple[TensorSpec, ...]:
    """Return tensors in the order of backward.

    Each is ready when its layer's backward ends, and needed when its forward begins.
    """
    total = sum(times)
    tensors: list[TensorSpec] = []
    done = 0.0
    for layer, time in zip(reversed(graph.layers), reversed(times), strict=True):
        done += time
        share = min(1.0, done / total)
        tensors += [
            TensorSpec(
                name=parameter.name,
                bytes=ELEMENT_BYTES * parameter.elements,
                dtype="float32",
                ready_s=share * backward_s,
                needed_s=max(0.0, (1.0 - share) * forward_s),
            )
            for parameter in reversed(layer.parameters)
        ]
    return tuple(tensors)
