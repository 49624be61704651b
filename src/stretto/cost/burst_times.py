"""Update a layer profile with times that ranks measured during training."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from stretto.errors import PlanMismatch
from stretto.schema.burst import BatchTime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.schema.burst import Layer, LayerProfile, LayerTiming


def updated(profile: LayerProfile, timings: Iterable[LayerTiming]) -> LayerProfile:
    """Return the profile with the measured times in place of its own.

    Several times for one layer and number of samples count by their median. At other
    numbers of samples, the layer's profiled times are multiplied by measured /
    profiled, interpolated between measured numbers on the logarithm of the samples:
    what slows a layer in training (other ranks on the host, cold caches) slows it there
    too. Layers without measurements keep their times.

    Raises:
        PlanMismatch: a timing is of a layer that is missing from the profile.
    """
    measured: dict[str, dict[int, list[tuple[float, float]]]] = {}
    known = {layer.name for layer in profile.layers}
    for timing in timings:
        if timing.layer not in known:
            raise PlanMismatch(
                f"a time was measured of layer {timing.layer!r}, which is missing from "
                f"{profile.name!r}: the profile is of another model. Run "
                "`stretto burst profile` again"
            )
        times_by_samples = measured.setdefault(timing.layer, defaultdict(list))
        times_by_samples[timing.samples].append((timing.forward_s, timing.backward_s))
    layers = tuple(
        _updated(layer, measured[layer.name]) if layer.name in measured else layer
        for layer in profile.layers
    )
    count = sum(
        len(each) for by_samples in measured.values() for each in by_samples.values()
    )
    return replace(
        profile,
        layers=layers,
        provenance=profile.provenance
        | {"measured_layers": len(measured), "measurements": count},
    )


def _updated(layer: Layer, measured: dict[int, list[tuple[float, float]]]) -> Layer:
    found = {
        samples: (median(t[0] for t in times), median(t[1] for t in times))
        for samples, times in measured.items()
    }
    old = {time.samples: time for time in layer.times}
    ratios = []
    for samples, (forward_s, backward_s) in sorted(found.items()):
        low, high = layer.times[0].samples, layer.times[-1].samples
        profiled = layer.time_of(min(max(samples, low), high))
        ratios.append(
            (
                samples,
                forward_s / profiled[0] if profiled[0] > 0 else 1.0,
                backward_s / profiled[1] if profiled[1] > 0 else 1.0,
            )
        )
    times = []
    for samples in sorted(old | found):
        if samples in found:
            forward_s, backward_s = found[samples]
        else:
            one, two = _ratio_at(ratios, samples)
            forward_s = old[samples].forward_s * one
            backward_s = old[samples].backward_s * two
        times.append(
            BatchTime(samples=samples, forward_s=forward_s, backward_s=backward_s)
        )
    return replace(layer, times=tuple(times))


def _ratio_at(
    ratios: list[tuple[int, float, float]], samples: int
) -> tuple[float, float]:
    """Return forward and backward ratios, interpolated; constant beyond the ends."""
    if samples <= ratios[0][0]:
        return ratios[0][1:]
    for low, high in itertools.pairwise(ratios):
        if samples <= high[0]:
            share = math.log(samples / low[0]) / math.log(high[0] / low[0])
            return (
                low[1] + share * (high[1] - low[1]),
                low[2] + share * (high[2] - low[2]),
            )
    return ratios[-1][1:]
