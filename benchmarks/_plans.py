"""Plans that several benchmarks use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.schema import Bucket, Plan

if TYPE_CHECKING:
    from torch import nn


def equal_buckets(model: nn.Module, unit_bytes: int, ranks: int, lanes: int) -> Plan:
    """Return buckets of at most ``unit_bytes``, last layers first, lanes in turn."""
    buckets: list[list[str]] = []
    size_bytes = unit_bytes
    for name, parameter in reversed(list(model.named_parameters())):
        more_bytes = parameter.numel() * parameter.element_size()
        if size_bytes + more_bytes > unit_bytes:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(name)
        size_bytes += more_bytes
    return Plan(
        planner="benchmark",
        workload_digest="",
        ranks=ranks,
        overlap="backward",
        lanes=lanes,
        buckets=tuple(
            Bucket(tensors=tuple(names), lane=i % lanes, wire_dtype="float32")
            for i, names in enumerate(buckets)
        ),
    )


def two_lanes(model: nn.Module, ranks: int) -> Plan:
    """Return two parameters per bucket, last layers first, two slices and lanes."""
    names = [name for name, _ in model.named_parameters()][::-1]
    return Plan(
        planner="benchmark",
        workload_digest="",
        ranks=ranks,
        overlap="backward",
        lanes=2,
        buckets=tuple(
            Bucket(
                tensors=tuple(names[i : i + 2]),
                lane=i // 2 % 2,
                slices=2,
                wire_dtype="float32",
            )
            for i in range(0, len(names), 2)
        ),
    )
