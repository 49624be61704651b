"""Join the layers between two cuts, where all paths through a graph meet."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.planners.burst.problem import Choice
from stretto.planners.burst.tree import parse
from stretto.schema.burst import BatchTime, Layer, LayerProfile

if TYPE_CHECKING:
    from collections.abc import Sequence


def expanded(choice: Choice, groups: Sequence[Sequence[int]]) -> Choice:
    """Return a choice for joined layers as one for the layers in them."""
    count = sum(map(len, groups))
    widths, first = [0] * count, [0] * count
    for i, group in enumerate(groups):
        for layer in group:
            widths[layer] = choice.widths[i]
            first[layer] = choice.first_gpus[i] if choice.first_gpus else 0
    return Choice(
        widths=tuple(widths),
        own=frozenset(groups[i][0] for i in choice.own),
        first_gpus=tuple(first) if choice.first_gpus else (),
    )


def collapsed(choice: Choice, groups: Sequence[Sequence[int]]) -> Choice:
    """Reverse `expanded`: each joined layer gets the choice of its last layer."""
    index = {group[0]: i for i, group in enumerate(groups)}
    first = choice.first_gpus
    return Choice(
        widths=tuple(choice.widths[group[-1]] for group in groups),
        own=frozenset(index[layer] for layer in choice.own),
        first_gpus=tuple(first[group[-1]] for group in groups) if first else (),
    )


def joined(profile: LayerProfile) -> tuple[LayerProfile, list[list[int]]]:
    """Return the profile with each crossing part as one layer, and the layers joined.

    All paths meet in a layer that no edge bypasses; O(V + E) except for the parses.
    """
    number = {layer.name: i for i, layer in enumerate(profile.layers)}
    furthest, cuts = 0, []
    last_use = list(range(len(number)))
    for i, layer in enumerate(profile.layers):
        for name in layer.inputs:
            last_use[number[name]] = i
    for i in range(len(number)):
        if furthest <= i:
            cuts.append(i)
        furthest = max(furthest, last_use[i])
    groups = [[0]] if cuts and cuts[0] == 0 else []
    for before, after in itertools.pairwise(cuts):
        part = list(range(before + 1, after + 1))
        if _crosses(profile, before, part):
            groups.append(part)
        else:
            groups += [[i] for i in part]
    layers = profile.layers
    name_of = {
        layers[i].name: "+".join(layers[k].name for k in group)
        for group in groups
        for i in group
    }
    made = tuple(_as_one(profile, group, name_of) for group in groups)
    return replace(profile, layers=made, whole=()), groups


def _crosses(profile: LayerProfile, before: int, part: list[int]) -> bool:
    inside = [profile.layers[i] for i in (before, *part)]
    inside[0] = replace(inside[0], inputs=())
    try:
        parse(replace(profile, layers=tuple(inside), whole=()))
    except SpecError:
        return True
    return False


def _as_one(profile: LayerProfile, group: list[int], name_of: dict[str, str]) -> Layer:
    some = [profile.layers[i] for i in group]
    last = some[-1]
    name = name_of[last.name]
    inputs = dict.fromkeys(name_of[n] for layer in some for n in layer.inputs)
    inputs.pop(name, None)
    if len(some) == 1:
        return replace(last, inputs=tuple(inputs))
    low = max(layer.times[0].samples for layer in some)
    high = min(layer.times[-1].samples for layer in some)
    counts = sorted(
        {t.samples for s in some for t in s.times if low <= t.samples <= high}
    )
    each = {n: [layer.time_of(n) for layer in some] for n in counts}
    return Layer(
        name=name,
        inputs=tuple(inputs),
        parameter_bytes=sum(layer.parameter_bytes for layer in some),
        activation_bytes=last.activation_bytes,
        times=tuple(
            BatchTime(
                samples=n,
                forward_s=sum(t[0] for t in times),
                backward_s=sum(t[1] for t in times),
            )
            for n, times in each.items()
        ),
        update_s=sum(layer.update_s for layer in some),
        norms=sum(layer.norms for layer in some),
    )
