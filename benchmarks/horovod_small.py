"""Time one small all-reduce of the Horovod interface, from call to result.

Four ranks, Gloo on loopback, 4 KiB. In one run, in turn, each behind a barrier: by a
known name, without a name (every call is new to the ranks and is announced), four at
once without waiting between them, and a bare Gloo all-reduce. Seconds of rank 0,
default settings.

``--rounds 30`` is the short form.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import stretto.horovod.torch as hvd
from _ranks import run
from _record import spread, store

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP = 10
BURST = 4


def burst(x: torch.Tensor) -> None:
    handles = [
        hvd.allreduce_async(x, name=f"burst{i}", op=hvd.Sum) for i in range(BURST)
    ]
    for handle in handles:
        hvd.synchronize(handle)


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    hvd.init()
    x = torch.ones(options.bytes // 4)
    variants: dict[str, Callable[[], object]] = {
        "named": lambda: hvd.allreduce(x, name="x", op=hvd.Sum),
        "unnamed": lambda: hvd.allreduce(x, op=hvd.Sum),
        "four at once": lambda: burst(x),
        "gloo": lambda: dist.all_reduce(x.clone()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(options.rounds + WARMUP):
        names = list(variants) if round_number % 2 else list(variants)[::-1]
        for name in names:
            dist.barrier()
            begin_s = time.perf_counter()
            variants[name]()
            if round_number >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
    if hvd.allreduce(x, op=hvd.Sum)[0].item() != size:
        raise AssertionError("a sum is wrong")
    hvd.shutdown()
    if rank:
        return
    store(
        options.name,
        {
            "what": "small all-reduce of the Horovod interface",
            "ranks": size,
            "bytes": options.bytes,
            "reach": {"seconds.named": "median under 0.003"},
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "ratio_to_gloo": spread(
                [a / b for a, b in zip(seconds["named"], seconds["gloo"], strict=True)]
            ),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--name", default="horovod_small")
    arguments = parser.parse_args()
    run(bench, arguments.ranks, arguments, timeout_s=300)
