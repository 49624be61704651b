"""Plans whose gradients are sent in a narrower type than their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.planners import registry
from stretto.planners.base import with_prediction
from stretto.schema import NARROWER
from stretto.schema.rules import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from stretto.planners.base import AbstractPlanner
    from stretto.schema import Cluster, Plan, Workload


def plan_with_wire(
    workload: Workload,
    cluster: Cluster,
    planner: str | AbstractPlanner,
    *,
    wire_dtype: str | None = None,
    near: Sequence[Plan] = (),
    **options: Any,
) -> Plan:
    """Return a plan that sends gradients as ``wire_dtype`` where possible.

    ``None`` sends each in its own type. ``near`` are plans from before small changes of
    the figures; if there are any, this calls `AbstractPlanner.replan`.

    The planner receives the workload as it is sent, so its options in bytes count bytes
    on the wire.

    Raises:
        SpecError: the planner or option is unknown, or no gradient can be sent so.
        Infeasible: no plan meets the limits.
    """
    chosen = registry.get(planner, **options)
    sent = workload if wire_dtype is None else narrowed(workload, wire_dtype)
    plan = chosen.replan(sent, cluster, near) if near else chosen.plan(sent, cluster)
    if wire_dtype is None:
        return plan
    own = replace(plan, workload_digest=workload.digest)
    return with_prediction(own, workload, cluster, chosen.scope(cluster))


def narrowed(workload: Workload, wire_dtype: str) -> Workload:
    """Return the workload as sent: gradients become ``wire_dtype`` where possible.

    Raises:
        SpecError: no gradient can be converted; or others are of that type already,
            which may not share a bucket with those that are converted.
    """
    held = {tensor.dtype for tensor in workload.tensors}
    wide = {dtype for dtype, narrower in NARROWER.items() if wire_dtype in narrower}
    if not held & wide:
        possible = sorted({n for dtype in held for n in NARROWER.get(dtype, ())})
        raise SpecError(
            f"wire_dtype must be narrower than the gradients ({', '.join(sorted(held))}"
            f"), got {wire_dtype!r}: "
            + (f"choose {' or '.join(possible)}." if possible else "leave it out.")
        )
    if wire_dtype in held:
        raise SpecError(
            f"wire_dtype {wire_dtype!r} is the type of some gradients of "
            f"{workload.name!r} already, beside {', '.join(sorted(held & wide))}: "
            "leave it out, or plan by hand."
        )
    return replace(
        workload,
        tensors=tuple(
            replace(
                tensor,
                dtype=wire_dtype,
                bytes=tensor.bytes
                // DTYPE_BYTES[tensor.dtype]
                * DTYPE_BYTES[wire_dtype],
            )
            if tensor.dtype in wide
            else tensor
            for tensor in workload.tensors
        ),
    )
