"""Compare Horovod's optimizer on the demo network with one flow and with our DDP.

Four lab hosts, 1 Gbit/s links, 300 Mbit/s per connection, the demo's convolutional
network. In one run, in blocks by turns:

- ``horovod``: `stretto.horovod.torch.DistributedOptimizer`, default settings;
- ``single flow``: the same with one lane, a fusion buffer of 64 MiB and a cycle of 1
  ms, as in published Horovod: one connection to each neighbor. Horovod's own library no
  longer builds, so this is an emulation by our engine, not Horovod;
- ``ddp``: `stretto.DistributedDataParallel` over the engine with the same lanes;
- ``ddp planned``: the same with a plan of equal buckets over as many lanes.

A step is the slowest rank's, from a barrier to the optimizer's end. Each block begins
with steps that do not count: engines are opened again and have to learn their order.

``--rounds 2 --steps 2 --width 24`` is the short form.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _plans import equal_buckets
from _record import spread, store
from stretto.lab import LabSpec, run_lab
from stretto.units import parse_rate_bytes_per_s

WARMUP = 6
SETTINGS: dict[str, dict[str, str]] = {
    "horovod": {},
    "single flow": {
        "HOROVOD_NUM_NCCL_STREAMS": "1",
        "HOROVOD_FUSION_THRESHOLD": str(64 * 2**20),
        "HOROVOD_CYCLE_TIME": "1",
    },
}


def bench(options: argparse.Namespace) -> None:
    """Run one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import stretto.horovod.torch as hvd
    from stretto.demo.tasks import ConvNet
    from stretto.runtime import DistributedDataParallel
    from stretto.runtime.negotiated import EngineOptions

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    defaults = EngineOptions()

    def make() -> Any:
        torch.manual_seed(0)
        return ConvNet(options.width)

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    lanes = options.lanes or defaults.lanes
    if options.lanes:
        SETTINGS["horovod"] = {"HOROVOD_NUM_NCCL_STREAMS": str(lanes)}
    plan = equal_buckets(make(), defaults.unit_bytes, size, lanes)
    how: dict[str, Any] = {"order": "negotiated", "lanes": lanes}
    models = {
        "horovod": make(),
        "single flow": make(),
        "ddp": DistributedDataParallel(make(), init_sync=False, **how),
        "ddp planned": DistributedDataParallel(make(), init_sync=False, plan=plan),
    }
    optimizers = {name: sgd(model) for name, model in models.items()}
    hvd.init()
    for name in SETTINGS:
        optimizers[name] = hvd.DistributedOptimizer(
            optimizers[name], named_parameters=models[name].named_parameters()
        )
    torch.manual_seed(1 + rank)
    images, labels = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))
    seconds: dict[str, list[float]] = {name: [] for name in models}

    def step(name: str) -> float:
        dist.barrier()
        begin_s = time.perf_counter()
        optimizers[name].zero_grad()
        nn.functional.cross_entropy(models[name](images), labels).backward()
        optimizers[name].step()
        taken = torch.tensor([time.perf_counter() - begin_s])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    for number in range(options.rounds):
        for name in list(models) if number % 2 else list(models)[::-1]:
            if name in SETTINGS:
                hvd.shutdown()
                for variable in SETTINGS["single flow"]:
                    os.environ.pop(variable, None)
                os.environ.update(SETTINGS[name])
                hvd.init()
            for _ in range(WARMUP):
                step(name)
            seconds[name] += [step(name) for _ in range(options.steps)]
    weights = {
        name: torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        for name, model in models.items()
    }
    away = {
        name: float((found - weights["ddp"]).abs().max())
        for name, found in weights.items()
    }
    hvd.shutdown()
    if rank == 0:
        found = {
            "seconds": seconds,
            "away": away,
            "lanes": lanes,
            "gradient_bytes": 4 * weights["ddp"].numel(),
        }
        Path(options.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=0, help="0: the default")
    parser.add_argument("--flow", default="300mbit")
    parser.add_argument("--name", default="horovod_optimizer")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        bench(options)
        return
    spec = LabSpec(
        hosts=4,
        link_bytes_per_s=parse_rate_bytes_per_s("1gbit"),
        flow_bytes_per_s=parse_rate_bytes_per_s(options.flow),
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--out", str(out)]
        for name in ("rounds", "steps", "width", "lanes"):
            command += [f"--{name}", str(getattr(options, name))]
        status = run_lab(spec, command, timeout_s=1800)
        if status:
            sys.exit(status)
        found = json.loads(out.read_text())
    seconds = found.pop("seconds")
    ours = seconds["horovod"]
    store(
        options.name,
        {
            "what": "DistributedOptimizer of stretto.horovod.torch, 4 lab hosts, "
            f"1 Gbit/s links, {options.flow} per flow, ConvNet({options.width})",
            "reach": {
                "over.single flow": "at least 2",
                "over.ddp": "at least 0.95",
            },
            **found,
            "step_s": {name: spread(values) for name, values in seconds.items()},
            "over": {
                name: spread([b / a for a, b in zip(ours, values, strict=True)])
                for name, values in seconds.items()
            },
        },
    )


if __name__ == "__main__":
    main()
