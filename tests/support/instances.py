"""Workloads and clusters by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.schema import Cluster, Link, TensorSpec, Workload
from stretto.testing.instances import build_workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


def workload_of(
    rows: Sequence[tuple[int, float]], *, dtype: str = "int8", **times: Any
) -> Workload:
    """A workload of tensors t0, t1, ... given as (bytes, ready_s)."""
    sizes_bytes, ready_s = zip(*rows, strict=True)
    return build_workload(sizes_bytes, ready_s, dtypes=[dtype] * len(rows), **times)


def workload_of_model(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    forward_s: float = 1e-3,
    backward_s: float = 2e-3,
) -> Workload:
    """A profile as `stretto profile` takes it, with gradients ready at an even pace."""
    rows = list(parameters)
    return Workload(
        name="net",
        framework="pytorch",
        device="cpu",
        batch_per_rank=8,
        forward_s=forward_s,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=name,
                bytes=p.numel() * p.element_size(),
                dtype=str(p.dtype).removeprefix("torch."),
                ready_s=backward_s * ((i + 1) / len(rows)),
                needed_s=0.0,
            )
            for i, (name, p) in enumerate(rows)
        ),
    )


def one_link(link: Link, **more: Any) -> Cluster:
    """Two hosts of one rank, unless ``more`` says otherwise; all links are equal."""
    figures = {
        "name": "c",
        "hosts": 2,
        "ranks_per_host": 1,
        "inter_host": link,
        "intra_host": link,
    }
    return Cluster(**(figures | more))
