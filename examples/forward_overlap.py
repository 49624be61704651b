"""AdamW and a scheduler with communication under the next forward.

Run on four emulated hosts, first without and then with overlap:

    stretto lab run --hosts 4 --link 1gbit -- python examples/forward_overlap.py
"""

import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.schema import Bucket, Plan


def plan_of(net: nn.Module, overlap: str) -> Plan:
    """One bucket per layer; forward needs the first layers' buckets first."""
    layers = [name for name, m in net.named_children() if list(m.parameters())][::-1]
    buckets = tuple(
        Bucket(tensors=(f"{n}.bias", f"{n}.weight"), lane=0, wire_dtype="float32")
        for n in layers
    )
    launch = (0, *range(len(buckets) - 1, 0, -1)) if overlap == "forward" else ()
    return Plan(
        planner="example",
        workload_digest="",
        ranks=dist.get_world_size(),
        overlap=overlap,
        lanes=1,
        buckets=buckets,
        launch=launch,
    )


def train(overlap: str) -> list[torch.Tensor]:
    """Return the parameters after some steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 1))
    model = stretto.DDP(net, plan=plan_of(net, overlap), overlap=overlap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(32, 256, generator=generator)).square().mean().backward()
        optimizer.step()  # updates what has arrived; the rest just before its use
        scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    without, within = train("backward"), train("forward")
    equal = all(torch.equal(a, b) for a, b in zip(without, within, strict=True))
    if dist.get_rank() == 0:
        print("equal bit for bit" if equal else "different")  # noqa: T201
    dist.destroy_process_group()
