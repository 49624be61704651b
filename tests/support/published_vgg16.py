"""Profiles of the authors' published artifact as our layer profiles.

Its files are not part of the repository; without them, these tests are skipped.
Lines are ``kind{parameters}[batch][input shape]``, total ms, forward us, backward us.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stretto.schema.burst import BatchTime, Layer, LayerProfile

FOLDER = Path(__file__).resolve().parents[2] / "../shared/data/deeppool"
_LINE = re.compile(
    r"\s*(\w+?)(\{.*\})\[(\d+)\]\[?([\d,]+)\]?\s+([\d.]+)\s+(\d+)\s+(\d+)"
)


def rows(file: str) -> dict[int, list[tuple]]:
    """(kind, parameters, input shape, forward_s, backward_s) by batch."""
    path = FOLDER / file
    if not path.exists():
        pytest.skip(f"the published profile {file} is not beside the repository")
    found: dict[int, list[tuple]] = {}
    for line in path.read_text().splitlines():
        if not (match := _LINE.match(line)):
            continue  # the artifact separates its runs by lines of their own
        kind, options, batch, shape, total, forward, _ = match.groups()
        shape = tuple(int(n) for n in shape.split(","))
        # The total is rounded, both parts are cut off: the total is more exact.
        backward_s = max(0.0, float(total) / 1e3 - int(forward) / 1e6)
        row = (kind, json.loads(options), shape, int(forward) / 1e6, backward_s)
        found.setdefault(int(batch), []).append(row)
    return found


def vgg16() -> LayerProfile:
    """VGG-16 as a chain; activations folded into the layer before, as its times ask."""
    by_batch = rows("A100_vgg.prof")
    first = by_batch[min(by_batch)]
    layers = []
    for i, (kind, options, shape, _, _) in enumerate(first):
        if kind.startswith("ReLU"):
            continue
        folded = [i]
        if i + 1 < len(first) and first[i + 1][0].startswith("ReLU"):
            folded.append(i + 1)
        layers.append(
            Layer(
                name=f"{len(layers)}.{kind}",
                inputs=(layers[-1].name,) if layers else (),
                parameter_bytes=_parameter_bytes(kind, options),
                activation_bytes=4 * _elements(first, i, kind, options, shape),
                times=tuple(
                    BatchTime(
                        samples=batch,
                        forward_s=sum(found[j][3] for j in folded),
                        backward_s=sum(found[j][4] for j in folded),
                    )
                    for batch, found in sorted(by_batch.items())
                ),
            )
        )
    return LayerProfile(
        name="vgg16", device="A100", layers=tuple(layers), provenance={}
    )


def _parameter_bytes(kind, options) -> int:
    if kind == "conv2d":
        side = options["kernel_size"]
        weight = options["in_channels"] * options["out_channels"] * side * side
        return 4 * (weight + options["out_channels"])
    if kind == "linear":
        return 4 * (options["in_features"] + 1) * options["out_features"]
    return 0


def _elements(first, i, kind, options, shape) -> int:
    """Elements of a layer's output for one sample: the next layer's input."""
    if i + 1 == len(first):
        return options["out_features"]
    count = 1
    for side in first[i + 1][2]:
        count *= side
    return count
