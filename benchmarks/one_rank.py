"""Compare the wrapper on one rank, without communication, with PyTorch and DDP.

Variants are interleaved step by step; the result is the median of paired ratios.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import stretto
from _record import spread, store
from stretto.demo.tasks import ConvNet

STEPS, WARMUP = 120, 10


def main() -> None:
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    wrap = {
        "plain": lambda model: model,
        "plain again": lambda model: model,
        "stretto": stretto.DistributedDataParallel,
        "ddp": torch.nn.parallel.DistributedDataParallel,
    }
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    steps = {}
    for name, wrapper in wrap.items():
        torch.manual_seed(0)
        model = wrapper(ConvNet())
        steps[name] = (model, torch.optim.SGD(model.parameters(), lr=0.01))
    seconds: dict[str, list[float]] = {name: [] for name in wrap}
    for step in range(STEPS + WARMUP):
        order = list(wrap) if step % 2 else list(wrap)[::-1]
        for name in order:
            model, optimizer = steps[name]
            begin = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if step >= WARMUP:
                seconds[name].append(time.perf_counter() - begin)
    ratios = {
        name: spread(
            [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        )
        for name in wrap
    }
    store(
        "one_rank",
        {
            "what": "step time over plain PyTorch's, one rank, demo network",
            "reach": "stretto's median ratio at most 1.01",
            "plain_step_s": spread(seconds["plain"]),
            "ratio": ratios,
        },
    )
    dist.destroy_process_group()
    (Path(folder) / "store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
