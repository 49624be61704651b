"""Small random graphs, and brute force written from the definitions alone."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from stretto.cost.burst import BurstNetwork
from stretto.schema import Link
from stretto.schema.burst import BatchTime, Layer, LayerProfile

if TYPE_CHECKING:
    import random

# A graph is a list of parts: a layer's number, or a list of branches, each such a list.


def chain_of(number: int):
    return list(range(number))


def random_shape(rng: random.Random, blocks: int, *, nested: bool = False):
    """A first layer, blocks with a layer after each; branches of 0 to 2 layers."""
    count = itertools.count()
    shape = [next(count)]
    for _ in range(blocks):
        branches = [[next(count)]]
        for _ in range(rng.randint(1, 2)):
            branches.append([next(count) for _ in range(rng.randint(0, 2))])
            if not branches[-1] and [] in branches[:-1]:
                branches[-1] = [next(count)]
        if nested:
            inner = [[next(count)], [next(count)]]
            branches[0] = [branches[0][0], inner, next(count)]
        shape += [branches, next(count)]
    return shape


def layers_in(shape):
    for part in shape:
        if isinstance(part, int):
            yield part
        else:
            for branch in part:
                yield from layers_in(branch)


def inputs_of(shape, before=None, found=None):
    """Layer -> the layers it reads."""
    found = {} if found is None else found
    ends = [] if before is None else [before]
    for part in shape:
        if isinstance(part, int):
            found[part] = list(ends)
            ends = [part]
        else:
            (head,) = ends
            ends = []
            for branch in part:
                inputs_of(branch, head, found)
                ends += ends_of(branch, head)
    return found


def ends_of(branch, head):
    """The layers with which a branch ends; several where it ends with a block."""
    if not branch or isinstance(branch[-1], int):
        return [branch[-1] if branch else head]
    before = branch[-2] if len(branch) > 1 else head
    return [end for inner in branch[-1] for end in ends_of(inner, before)]


def random_profile(rng: random.Random, shape, batch: int) -> LayerProfile:
    inputs = inputs_of(shape)
    layers = []
    for i in sorted(inputs):
        start, each = rng.uniform(0, 3e-4), rng.uniform(0, 2e-4)
        bent = rng.uniform(0.5, 1.0)
        times = [
            BatchTime(
                samples=s,
                forward_s=(start + each * s**bent) / 3,
                backward_s=(start + each * s**bent) * 2 / 3,
            )
            for s in range(1, batch + 1)
        ]
        layers.append(
            Layer(
                name=f"l{i}",
                inputs=tuple(f"l{j}" for j in inputs[i]),
                parameter_bytes=rng.choice([0, 10**5, 10**7]),
                activation_bytes=rng.choice([0, 10**3, 10**6, 4 * 10**6]),
                times=tuple(times),
            )
        )
    return LayerProfile(
        name="random", device="none", layers=tuple(layers), provenance={}
    )


def random_network(rng: random.Random) -> BurstNetwork:
    link = Link(latency_s=rng.choice([0.0, 1e-5, 1e-4]), bandwidth_bytes_per_s=10.0**10)
    return BurstNetwork(
        transfer=link,
        near=link,
        far=link,
        near_gpus=1,
        sync=rng.choice(["transfer", "ring", "hidden"]),
    )


class Oracle:
    """Every choice's time, from the model's words and nothing of the planner's."""

    def __init__(self, profile, network, shape, gpus, batch, widths, limit) -> None:
        self.layers, self.network, self.shape = profile.layers, network, shape
        self.gpus, self.batch, self.widths, self.limit = gpus, batch, widths, limit

    def share(self, g):
        return math.ceil(self.batch / g)

    def own_s(self, i, g):
        layer = self.layers[i]
        sync = self.network.sync_s(layer.parameter_bytes, g)
        return layer.compute_s(self.share(g)) + sync

    def comm_s(self, i, g, h, moved):
        link = self.network.transfer
        each = 2 * self.layers[i].activation_bytes / link.bandwidth_bytes_per_s
        if moved:
            return each * max(self.share(g), self.share(h)) + 2 * link.latency_s
        if g == h:
            return 0.0
        return each * abs(self.share(g) - self.share(h)) + 2 * link.latency_s

    def amp(self, i, g, comm):
        single = self.layers[i].compute_s(self.batch)
        return (comm + self.own_s(i, g)) * g / single if single else 0.0

    def arrive(self, i, j, of, moved):
        comm = self.comm_s(i, of[i], of[j], moved)
        self.amps.append(self.amp(j, of[j], comm))
        self.gpu_s += comm * of[j]
        return comm

    def walk(self, shape, before, after, of, beside, into, out):
        """Time and peak between two layers (either may be none)."""
        time, peak, ends = 0.0, 0, before
        block, first = None, True
        parts = [*shape, after] if after is not None else shape
        for n, part in enumerate(parts):
            last = n == len(parts) - 1 and after is not None
            if isinstance(part, list):
                block = part
                continue
            moved = (into and first) or (out and last)
            if block is not None:
                turns, turns_peak, long, long_peak = 0.0, 0, 0.0, 0
                for branch in block:
                    own = bool(branch) and id(branch) in beside
                    t, p = self.walk(
                        branch,
                        ends,
                        part,
                        of,
                        beside,
                        (into and first) or own,
                        (out and last) or own,
                    )
                    if own:
                        long, long_peak = max(long, t), long_peak + p
                    else:
                        turns, turns_peak = turns + t, max(turns_peak, p)
                time += max(turns, long)
                peak = max(peak, turns_peak + long_peak)
                block = None
            elif ends is not None:
                time += self.arrive(ends, part, of, moved)
            else:
                self.amps.append(self.amp(part, of[part], 0.0))
            first = False
            if not last:
                time += self.own_s(part, of[part])
                self.gpu_s += of[part] * self.own_s(part, of[part])
                peak = max(peak, of[part])
            ends = part
        return time, peak

    def blocks(self, shape):
        for part in shape:
            if isinstance(part, list):
                yield part
                for branch in part:
                    yield from self.blocks(branch)

    def every(self):
        """(time, GPU time, worst amplification) of each choice within the GPUs."""
        ways = []
        for block in self.blocks(self.shape):
            some = []
            for mask in range(2 ** len(block) - 1):
                own = [b for i, b in enumerate(block) if mask >> i & 1]
                if all(own):
                    some.append([id(b) for b in own])
            ways.append(some)
        count = len(self.layers)
        for way in itertools.product(*ways):
            beside = set(itertools.chain(*way))
            for of in itertools.product(self.widths, repeat=count):
                self.amps, self.gpu_s = [], 0.0
                time, peak = self.walk(self.shape, None, None, of, beside, False, False)
                if peak <= self.gpus:
                    yield time, self.gpu_s, max(self.amps), of

    def best(self):
        allowed = (
            time
            for time, _, amp, _ in self.every()
            if self.limit is None or amp <= self.limit * (1 + 1e-9)
        )
        return min(allowed, default=math.inf)
