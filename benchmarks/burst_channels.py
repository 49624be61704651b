"""Estimate whether splitting layers by channels shortens burst plans.

    .venv/bin/python benchmarks/burst_channels.py [--gpus 8] [--batch 32]

The question of DeepPool's section 8. A layer split by its output channels over g GPUs
has no gradients to synchronize, but each GPU needs the whole batch of its input: an
all-gather forward and a reduce-scatter of the input's gradient backward, B (g-1)/g
input bytes each, in the middle of the step. Afterwards its output is converted to the
next layer's split by samples and its gradient back, B (g-1)/g^2 output bytes each.
Computation is that of B/g samples, which favors channels: their kernels are smaller.

For each of the zoo's models and each network, the fastest burst plan is compared with
one in which every layer with parameters may change to a channel split of any width. The
bound leaves the conversion of outputs out; the estimate counts it. Both change one
layer at a time and keep the plan's other costs: only the bound covers pairs of layers
that pass a channel split on to each other. Stores results/burst_channels.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from _record import store
from stretto._api import burst
from stretto.cost.burst import DEEPPOOL, samples_on
from stretto.planners.burst.problem import BurstProblem
from stretto.zoo import layer_profile

MODELS = ("vgg11", "vgg16", "wide-resnet101-2", "inception-v3")
SAMPLES = tuple(2**i for i in range(7))
BANDWIDTHS = {"NVSwitch": None, "100 Gbit/s": 12.5e9, "10 Gbit/s": 1.25e9}


def network_of(bandwidth):
    if bandwidth is None:
        return DEEPPOOL
    link = replace(DEEPPOOL.transfer, bandwidth_bytes_per_s=bandwidth)
    return replace(DEEPPOOL, transfer=link, near=link, far=link)


def by_channels_s(problem, index, gpus, *, converts):
    """Return the time of a layer split by channels, with its own transfers."""
    profile, batch, link = problem.profile, problem.batch, problem.network.transfer
    layer = profile.layers[index]
    bytes_of = {each.name: each.activation_bytes for each in profile.layers}
    reads = sum(bytes_of[name] for name in layer.inputs) or profile.input_bytes
    passes = 2 if layer.inputs else 1  # nothing is sent back to the model's input
    moved = [passes * batch * reads * (gpus - 1) / gpus]
    if converts:
        moved.append(2 * batch * layer.activation_bytes * (gpus - 1) / gpus**2)
    waits = passes + (2 if converts else 0)
    seconds = sum(moved) / link.flow_bytes_per_s + waits * link.latency_s
    return layer.compute_s(samples_on(batch, gpus)) + seconds


def measure(name, bandwidth, gpus, batch):
    profile = layer_profile(name, samples=SAMPLES)
    problem = BurstProblem.of(
        profile, network_of(bandwidth), gpus=gpus, batch=batch, widths="powers"
    )
    plan = burst.plan(problem)
    row = {
        "plan_s": plan.predicted.iteration_s,
        "data_parallel_s": plan.predicted.data_parallel_s,
    }
    for what, converts in (("bound", False), ("estimate", True)):
        saved_s, changed = 0.0, []
        for index, (layer, entry) in enumerate(
            zip(profile.layers, plan.layers, strict=True)
        ):
            if not layer.parameter_bytes:
                continue
            now_s = problem.node_s[index][problem.widths.index(entry.gpus)]
            best_s, width = min(
                (by_channels_s(problem, index, g, converts=converts), g)
                for g in problem.widths
                if g > 1
            )
            if best_s < now_s:
                saved_s += float(now_s - best_s)
                changed.append(f"{layer.name}: {entry.gpus} -> {width} by channels")
        row[what] = {
            "shorter_ratio": saved_s / plan.predicted.iteration_s,
            "layers": len(changed),
            "changed": changed[:8],
        }
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    rows = {
        model: {
            network: measure(model, bandwidth, given.gpus, given.batch)
            for network, bandwidth in BANDWIDTHS.items()
        }
        for model in MODELS
    }
    store("burst_channels", {"gpus": given.gpus, "batch": given.batch, "models": rows})


if __name__ == "__main__":
    main()
