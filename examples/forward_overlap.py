"""AdamW and a scheduler, with overlap "backward" and with overlap "auto".

Layers also sleep, as if computed by devices of their own. On two emulated hosts:

    stretto lab run --hosts 2 --link 300mbit -- python examples/forward_overlap.py
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto


def emulate(layer: nn.Module, _inputs: tuple[Tensor, ...], out: Tensor) -> None:
    """Sleep in forward and, twice as long, in backward."""
    time.sleep(0.002)
    out.register_hook(lambda _gradient: time.sleep(0.004))


class Job:
    """A model in training."""

    def __init__(self, overlap: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        for layer in net:
            layer.register_forward_hook(emulate)
        self.model = stretto.DDP(net, overlap=overlap)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def train(self, steps: int) -> float:
        """Return the mean duration of a step, in seconds."""
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = torch.randn(8, 256, generator=self.generator)
            self.model(batch).square().mean().backward()
            self.optimizer.step()  # updates what has arrived; the rest before its use
            self.scheduler.step()
        return (time.perf_counter() - begin_s) / steps


if __name__ == "__main__":
    dist.init_process_group("gloo")
    backward, auto = Job("backward"), Job("auto")
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for job in (backward, auto):
        job.train(steps)  # which settles a plan
    few = steps // 20
    ratio = median(auto.train(few) / backward.train(few) for _ in range(5))
    pairs = zip(backward.model.parameters(), auto.model.parameters(), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)
    if dist.get_rank() == 0:
        print("equal bit for bit" if equal else "different")  # noqa: T201
        print(f"{ratio:.2f} of the step with backward alone")  # noqa: T201
    dist.destroy_process_group()
