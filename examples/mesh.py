"""Data parallelism beside tensor or pipeline parallelism, on a mesh of two dimensions.

Two emulated hosts of two ranks: the ranks of a host share the layers, and hosts share
the batch. Gradients travel between hosts over connections of at most 300 Mbit/s.

    stretto lab run --hosts 2 --ranks-per-host 2 --flow 300mbit -- \
        python examples/mesh.py tensor
    stretto lab run --hosts 2 --ranks-per-host 2 --flow 300mbit -- \
        python examples/mesh.py pipeline

``--ddp`` trains with PyTorch's DDP, whose losses and step time can be compared.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import stretto

WIDTH, LAYERS, SAMPLES, MICRO_BATCHES = 384, 8, 32, 4


class Layer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of x and the layer's output."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def samples(step: int, part: int) -> Tensor:
    """Return the inputs of one part of the batch."""
    generator = torch.Generator().manual_seed(2 * step + part)
    return torch.randn(SAMPLES, WIDTH, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (output - target).square().mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("tensor", "pipeline"))
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", options.kind))
    part, place = mesh["data"].get_local_rank(), mesh[options.kind].get_local_rank()
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    if options.kind == "tensor":
        net = nn.Sequential(*layers)
        ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        shards = {
            f"{i}.{name}": way for i in range(LAYERS) for name, way in ways.items()
        }
        parallelize_module(net, mesh["tensor"], shards)
    else:
        half = LAYERS // 2
        net = nn.Sequential(*layers[place * half : (place + 1) * half])

    if options.ddp:
        model = nn.parallel.DistributedDataParallel(net, device_mesh=mesh["data"])
    else:
        model = stretto.DDP(net, device_mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options.kind == "pipeline":
        group = mesh["pipeline"].get_group()
        stage = PipelineStage(model, place, 2, torch.device("cpu"), group=group)
        pipeline = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)

    losses: list[float] = []
    took: list[float] = []
    target = torch.zeros(SAMPLES, WIDTH)
    for step in range(options.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        inputs = samples(step, part)
        if options.kind == "tensor":
            loss = loss_of(model(inputs), target)
            loss.backward()
            losses.append(loss.item())
        elif place == 0:
            pipeline.step(inputs)
        else:
            each: list[Tensor] = []
            pipeline.step(target=target, losses=each)
            losses.append(torch.stack(each).mean().item())
        optimizer.step()
        took.append(time.perf_counter() - began)
    # The last stage has the loss, and rank 0 is shown.
    last = [losses[-1] if losses else 0.0]
    dist.broadcast_object_list(last, src=1)
    if dist.get_rank() == 0:
        step_ms = sorted(took[-20:])[len(took[-20:]) // 2] * 1e3
        print(f"last loss {last[0]:.9f}, last steps {step_ms:.0f} ms", flush=True)  # noqa: T201
    dist.destroy_process_group()
