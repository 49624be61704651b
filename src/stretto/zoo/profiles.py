"""A model's layers with times by number of samples: a profile for burst planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.schema.burst import BatchTime, Layer, LayerProfile
from stretto.zoo.models import model
from stretto.zoo.timing import DEVICES, layer_times_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.zoo.graph import ModelGraph

SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# Forward and backward on one A100 with mixed precision, by samples: sums over layers
# that the DeepPool authors published.
_A100_S = {
    "vgg16": {
        1: 3.35e-3,
        2: 5.04e-3,
        4: 8.08e-3,
        8: 14.61e-3,
        16: 27.08e-3,
        32: 51.43e-3,
        64: 100.72e-3,
    },
    "inception-v3": {
        1: 6.91e-3,
        2: 7.96e-3,
        4: 10.10e-3,
        8: 14.21e-3,
        16: 23.02e-3,
        32: 40.86e-3,
        64: 74.36e-3,
    },
}


def layer_profile(
    name: str,
    *,
    size: int | None = None,
    samples: Iterable[int] = SAMPLES,
    device: str = "a100",
) -> LayerProfile:
    """Return a model of the zoo as a layer profile, its times by roofline.

    A batch normalization counts with the convolution before it if nothing else reads
    that convolution. A layer's backward takes twice its forward. On an A100 the times
    of VGG-16 and Inception-v3 are scaled to published ones; the scale is interpolated
    between the published numbers of samples and constant beyond them.

    Args:
        name: one of `MODELS`.
        size: height and width of images or tokens of sequences; ``None``: the default.
        samples: on one device; a plan needs every number that it puts on one.
        device: one of `DEVICES`.

    Raises:
        SpecError: an argument is invalid.
    """
    graph = model(name, size)
    counts = sorted(set(samples))
    if not counts or counts[0] < 1:
        raise SpecError(f"samples must be at least one number >= 1, got {counts}")
    if device not in DEVICES:
        raise SpecError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    known = _A100_S.get(name, {}) if device == "a100" and size is None else {}
    at = DEVICES[device]
    scales = {
        count: total_s / (3 * sum(layer_times_s(graph, count, at)))
        for count, total_s in known.items()
    }
    rows = []
    for count in counts:
        scale = _between(scales, count)
        rows.append([scale * t for t in layer_times_s(graph, count, at)])
    holder = _holders(graph)
    kept = [i for i, held_by in enumerate(holder) if held_by == i]
    members: dict[int, list[int]] = {i: [] for i in kept}
    for i, held_by in enumerate(holder):
        members[held_by].append(i)
    layers = tuple(
        Layer(
            name=graph.layers[i].name,
            inputs=tuple(
                graph.layers[name].name
                for name in dict.fromkeys(holder[j] for j in graph.layers[i].inputs)
            ),
            parameter_bytes=sum(graph.layers[j].parameter_bytes for j in members[i]),
            activation_bytes=graph.layers[members[i][-1]].activation_bytes,
            times=tuple(
                BatchTime(
                    samples=count,
                    forward_s=sum(row[j] for j in members[i]),
                    backward_s=2 * sum(row[j] for j in members[i]),
                )
                for count, row in zip(counts, rows, strict=True)
            ),
        )
        for i in kept
    )
    return LayerProfile(
        name=name,
        device=at.name,
        layers=layers,
        provenance={
            "made_from": "architecture definition; layer times by roofline",
            "sample": graph.sample,
            "times": "sums published by the DeepPool authors" if known else "roofline",
        },
    )


def _holders(graph: ModelGraph) -> list[int]:
    """Return for each layer the one it counts with.

    A batch normalization counts with the convolution that only it reads, any other
    layer with itself.
    """
    readers: dict[int, int] = {}
    for layer in graph.layers:
        for j in layer.inputs:
            readers[j] = readers.get(j, 0) + 1
    holder = []
    for i, layer in enumerate(graph.layers):
        before = layer.inputs[0] if layer.kind == "batch_norm" else i
        alone = graph.layers[before].kind == "conv" and readers[before] == 1
        holder.append(before if before != i and alone else i)
    return holder


def _between(scales: dict[int, float], count: int) -> float:
    """Return the scale at a number of samples, linear between the known ones."""
    if not scales:
        return 1.0
    low = max((n for n in scales if n <= count), default=min(scales))
    high = min((n for n in scales if n >= count), default=max(scales))
    if low >= high:
        return scales[low] if low <= count else scales[high]
    part = (count - low) / (high - low)
    return scales[low] * (1 - part) + scales[high] * part
