"""Small jobs and networks for tests of planners and techniques."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from stretto.schema import (
    AllReduceFit,
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    Link,
    RateCurve,
    TensorSpec,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 2**20


def build_workload(
    sizes_bytes: Sequence[int],
    ready_s: Sequence[float],
    *,
    forward_s: float = 0.0,
    backward_s: float | None = None,
    dtypes: Sequence[str] | None = None,
) -> Workload:
    """Return a workload of tensors t0, t1, ... with sizes and ready times."""
    return Workload(
        name="instance",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=forward_s,
        backward_s=max(ready_s) if backward_s is None else backward_s,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=size,
                dtype=dtypes[i] if dtypes else "float32",
                ready_s=at_s,
                needed_s=0.0,
            )
            for i, (size, at_s) in enumerate(zip(sizes_bytes, ready_s, strict=True))
        ),
    )


def build_cluster(
    *,
    hosts: int = 4,
    link_bytes_per_s: float = 117e6,
    flow_bytes_per_s: float | None = 36e6,
    latency_s: float = 1.7e-4,
    gamma: tuple[float, ...] | None = None,
    contention: Contention | None = None,
) -> Cluster:
    """Return a cluster of hosts with one rank each."""
    return Cluster(
        name="cluster",
        hosts=hosts,
        ranks_per_host=1,
        inter_host=Link(
            latency_s=latency_s,
            bandwidth_bytes_per_s=link_bytes_per_s,
            stream_bytes_per_s=flow_bytes_per_s,
        ),
        intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=1e10),
        concurrency=Concurrency(gamma=gamma) if gamma else None,
        contention=contention,
    )


CONTENTION = Contention(
    compute=ComputeContention(alpha1=1.0, alpha2=0.1),
    overlapped=RateCurve(gamma1=5e7, gamma2=2e7, gamma3=0.5, gamma4=0.6),
    exclusive=RateCurve(gamma1=6e7, gamma2=2e7, gamma3=0.5, gamma4=0.6),
    resources=(1, 2),
)


def random_instance(
    seed: int, tensors: int | None = None, *, contended: bool = False
) -> tuple[Workload, Cluster]:
    """Return a workload and a cluster as a seed draws them.

    The mixtures of real models: bursts, even pace, a giant at the end, mostly tiny
    tensors; start-ups from nothing to dominating; flows that fill the link or don't,
    and that slow each other or, where ``contended``, computation too.
    """
    rng = random.Random(seed)
    number = tensors or rng.randint(1, 6)
    backward_s = rng.uniform(0.02, 0.2)
    gaps = {
        "even": [1.0] * number,
        "bursts": [rng.choice((0.0, 0.0, 1.0)) for _ in range(number)],
        "mixed": [rng.random() for _ in range(number)],
        "at once": [0.0] * number,
    }[rng.choice(("even", "bursts", "mixed", "at once"))]
    total = sum(gaps) or 1.0
    ready = []
    at_s = 0.0
    for gap in gaps:
        at_s += gap / total * backward_s * 0.999
        ready.append(at_s)
    sizes = [4 * int(2 ** rng.uniform(0, 20)) for _ in range(number)]
    if rng.random() < 0.3:
        sizes[-1] *= 8
    if rng.random() < 0.3:
        sizes = [s if rng.random() < 0.35 else 4 * rng.randint(0, 64) for s in sizes]
    workload = build_workload(
        sizes, ready, forward_s=rng.uniform(0.0, 0.1), backward_s=backward_s
    )
    cluster = build_cluster(
        hosts=rng.choice((2, 4, 8)),
        latency_s=rng.choice((0.0, 1e-5, 2e-4, 5e-3)),
        flow_bytes_per_s=rng.choice((None, 36e6, 60e6, 20e6)),
        gamma=rng.choice((None, None, (1.0, 1.5), (1.0, 1.1, 1.2, 2.0))),
        contention=CONTENTION if contended else None,
    )
    return workload, cluster


def small_workload() -> Workload:
    """Return a job of eight gradients of 4 KiB to 8 MiB with a step of 0.13 s."""
    sizes = [MIB // 4, MIB, 3 * MIB, 4 * MIB, 2 * MIB, MIB // 2, 4096, 8 * MIB]
    return Workload(
        name="small",
        framework="pytorch",
        device="cpu",
        batch_per_rank=8,
        forward_s=0.03,
        backward_s=0.1,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=size,
                dtype="float32",
                ready_s=0.1 * (i + 1) / len(sizes),
                needed_s=0.03 * (len(sizes) - 1 - i) / len(sizes),
            )
            for i, size in enumerate(sizes)
        ),
    )


def capped_cluster() -> Cluster:
    """Return four hosts whose flows reach 35 of the link's 120 MB/s."""
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1.2e8, stream_bytes_per_s=0.35e8)
    return Cluster(
        name="capped",
        hosts=4,
        ranks_per_host=1,
        inter_host=link,
        intra_host=link,
        allreduce=AllReduceFit(startup_s=0.003, s_per_byte=4.3e-8, ranks=4),
    )
