"""Convert a plan to flows for the event engine, and its outcome to spans.

Called by `stretto.sim.step` and `stretto.sim.forward`, which run the engine, and by
`stretto.sim.replay`, which keeps a plan's flows for the step model. Called by
`stretto.sim.network` for caps and levels, and by `stretto.testing.libra_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost import FlowRates, collective_cost, curve_bytes_per_s, flow_rates
from stretto.errors import SpecError
from stretto.schema import Span, slice_bounds
from stretto.schema.plan import WIRE_DTYPES
from stretto.schema.rules import DTYPE_BYTES
from stretto.sim.engine import Flow, SharedLink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.schema import Cluster, Contention, Plan, TensorSpec, Workload
    from stretto.sim.engine import Outcome

STARTUPS = ("phase", "mixed")
"""How a flow's start-up is counted: as a time before the first byte, or spread evenly
over the message as in LIBRA (Eq. 9-11)."""


@dataclass(frozen=True, slots=True)
class FlowSlice:
    """Timeline data of a flow apart from its times."""

    name: str
    bucket: int
    slice: int
    bytes: int
    tensors: int


def plan_flows(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    origin_s: float,
    part: str = "all_reduce",
    startup: str = "phase",
) -> tuple[list[Flow], list[FlowSlice]]:
    """Return a plan's flows in launch order, with backward starting at ``origin_s``.

    Raises:
        SpecError: a resource is missing from the cluster, or ``startup`` is unknown.
    """
    if startup not in STARTUPS:
        raise SpecError(
            f"startup must be one of {', '.join(STARTUPS)}, got {startup!r}",
            place=".startup",
        )
    flows: list[Flow] = []
    slices: list[FlowSlice] = []
    if cluster.ranks == 1:
        return flows, slices
    rates = flow_rates(cluster)
    costs = {
        algorithm: collective_cost(cluster, algorithm, part=part, lanes=plan.lanes)
        for algorithm in dict.fromkeys(bucket.algorithm for bucket in plan.buckets)
    }
    tensors = {tensor.name: tensor for tensor in workload.tensors}
    ready_work_s = 0.0
    for i in plan.launch_order:
        bucket = plan.buckets[i]
        held = [tensors[name] for name in bucket.tensors]
        after_s = max(tensor.ready_s for tensor in held)
        if plan.overlap == "none":
            after_s = workload.backward_s
        ready_work_s = max(ready_work_s, origin_s + after_s)
        cost = costs[bucket.algorithm]
        load = 0
        caps = (rates.alone_bytes_per_s, rates.alone_bytes_per_s)
        if cluster.contention is not None:
            load = resource_of(
                bucket.resource, cluster.contention, place=f".buckets[{i}].resource"
            )
            caps = curve_caps(cluster.contention, load, rates)
        elements = sum(tensor.bytes // DTYPE_BYTES[tensor.dtype] for tensor in held)
        on_wire = sum(_sent_bytes(tensor, bucket.wire_dtype) for tensor in held)
        bounds = slice_bounds(elements, bucket.slices)
        for j, (begin, end) in enumerate(bounds):
            size_bytes = on_wire * (end - begin) / elements
            name = f"bucket {i}"
            if len(bounds) > 1:
                name += f" slice {j + 1}/{len(bounds)}"
            slices.append(FlowSlice(name, i, j, round(size_bytes), len(held)))
            startup_s = cost.startup_of(size_bytes)
            wire_bytes = cost.wire_factor * size_bytes
            flow_caps = caps
            if startup == "mixed":
                flow_caps = (
                    wire_bytes / (startup_s + wire_bytes / caps[0]),
                    wire_bytes / (startup_s + wire_bytes / caps[1]),
                )
                startup_s = 0.0
            flows.append(
                Flow(
                    lane=(bucket.lane + j) % plan.lanes,
                    ready_work_s=ready_work_s,
                    startup_s=startup_s,
                    wire_bytes=wire_bytes,
                    cap_bytes_per_s=flow_caps[0],
                    idle_cap_bytes_per_s=flow_caps[1],
                    load=load,
                )
            )
    return flows, slices


def bottleneck_link(cluster: Cluster) -> SharedLink:
    """Return the one link that all flows of a plan share."""
    rates = flow_rates(cluster)
    return SharedLink(
        capacity_bytes_per_s=rates.link_bytes_per_s,
        limits_bytes_per_s=rates.limits_bytes_per_s,
    )


def _sent_bytes(tensor: TensorSpec, wire_dtype: str) -> int:
    """Return a gradient's bytes on the wire; unconverted types keep their own."""
    if tensor.dtype not in WIRE_DTYPES:
        return tensor.bytes
    return tensor.bytes // DTYPE_BYTES[tensor.dtype] * DTYPE_BYTES[wire_dtype]


def resource_of(
    resource: int | None, contention: Contention, *, place: str = ".resource"
) -> int:
    """Return the level of a bucket with a resource; ``None``: the default.

    Raises:
        SpecError: the contention does not list it.
    """
    if resource is None:
        return contention.resources[0]
    if resource not in contention.resources:
        levels = ", ".join(map(str, contention.resources))
        raise SpecError(
            f"resource must be one of the cluster's levels ({levels}), got {resource}",
            place=place,
        )
    return resource


def curve_caps(
    contention: Contention, resource: int, rates: FlowRates
) -> tuple[float, float]:
    """Return a flow's highest rate while computation runs, and after."""
    return (
        min(
            rates.alone_bytes_per_s, curve_bytes_per_s(contention.overlapped, resource)
        ),
        min(rates.alone_bytes_per_s, curve_bytes_per_s(contention.exclusive, resource)),
    )


def flow_spans(
    flows: Sequence[Flow], slices: Sequence[FlowSlice], outcome: Outcome
) -> Iterator[Span]:
    """Return the spans of each flow: waiting for its lane, and sending."""
    for i, (flow, part) in enumerate(zip(flows, slices, strict=True)):
        args = {
            "bucket": part.bucket,
            "slice": part.slice,
            "bytes": part.bytes,
            "tensors": part.tensors,
        }
        track = f"lane{flow.lane}"
        ready_s, start_s = outcome.ready_s[i], outcome.start_s[i]
        if start_s > ready_s:
            yield Span(
                track=track,
                name=f"wait {part.name}",
                start_s=ready_s,
                end_s=start_s,
                args={"kind": "wait", **args},
            )
        yield Span(
            track=track,
            name=part.name,
            start_s=start_s,
            end_s=outcome.end_s[i],
            args={"kind": "send", **args},
        )
