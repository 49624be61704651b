"""DDP, ours without a plan, with one, and as users get it, with DDP's own signature.

PyTorch's tests pass ``device_ids``, which DDP takes only for a GPU: each form drops
them. The planned form makes a plan of the very model it is given, so that every test
runs over several buckets, lanes and slices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import on_cpu
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto import variable_names
from stretto.runtime import DistributedDataParallel as Ours
from stretto.runtime.plan_binding import parameter_rows
from stretto.schema import Bucket, Plan

if TYPE_CHECKING:
    from torch import nn

LANES = 3


class Baseline(TorchDDP):
    """DDP itself."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args[2:], **on_cpu.without_devices(kwargs))


class Plain(Ours):
    """Ours with plan=None: DDP's buckets."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args[2:], **on_cpu.without_devices(kwargs))


class Planned(Ours):
    """Ours with buckets, lanes and slices."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs = on_cpu.without_devices(kwargs)
        super().__init__(module, *args[2:], plan=plan_of(module), **kwargs)


class OneBucket(Ours):
    """Ours with a plan of one bucket, whole, on one lane, per type of gradient."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs = on_cpu.without_devices(kwargs)
        plan = plan_of(module, buckets=1, slices=1)
        super().__init__(module, *args[2:], plan=plan, **kwargs)


class Auto(stretto.DistributedDataParallel):
    """Ours as users get it: plan="auto", which tunes while the test trains."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args[2:], **on_cpu.without_devices(kwargs))


class Forced(Auto):
    """The same on the schedule that passes every phase within ten steps."""


class Chosen(Auto):
    """The same with ``overlap="auto"``, plans that overlap with forward, and poison."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, overlap="auto", **kwargs)


class Forward(Ours):
    """Ours with buckets that overlap with the next forward, and poison what is pending.

    Buckets then count as unfinished until something reads, and such reads find NaN.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs = on_cpu.without_devices(kwargs)
        plan = plan_of(module)
        if plan is not None:
            turned = tuple(range(len(plan.buckets) - 1, -1, -1))
            plan = replace(plan, overlap="forward", launch=turned)
        super().__init__(module, *args[2:], plan=plan, **kwargs)


ENVIRONMENT = {
    "forced": {variable_names.TUNE_SCHEDULE: "forced"},
    "forward": {variable_names.POISON: "1"},
    "chosen": {
        variable_names.POISON: "1",
        variable_names.TUNE_SCHEDULE: "forced-forward",
    },
}
"""What a form's ranks have in their environment besides."""

FORMS: dict[str, type[TorchDDP]] = {
    "ddp": Baseline,
    "ours": Plain,
    "planned": Planned,
    "auto": Auto,
    "forced": Forced,
    "forward": Forward,
    "chosen": Chosen,
}


def plan_of(module: nn.Module, *, buckets: int = 3, slices: int = 2) -> Plan | None:
    """A number of buckets per type of gradient; sparse gradients alone.

    ``None`` for a model without parameters to train, which DDP refuses.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    rows = [row for row, _ in parameter_rows(module, ignored)][::-1]
    sparse = _sparse_names(module)
    made: list[Bucket] = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        names = [r.name for r in rows if r.dtype == dtype and r.name not in sparse]
        share = -(-len(names) // buckets) or 1
        groups = [names[i : i + share] for i in range(0, len(names), share)]
        groups += [[r.name] for r in rows if r.dtype == dtype and r.name in sparse]
        for group in groups:
            whole = group[0] in sparse
            made.append(
                Bucket(
                    tensors=tuple(group),
                    lane=len(made) % LANES,
                    slices=1 if whole else slices,
                    wire_dtype=dtype,
                )
            )
    if not made:
        return None
    return Plan(
        planner="conformance",
        workload_digest="",
        ranks=2,
        overlap="backward",
        lanes=LANES,
        buckets=tuple(made),
    )


def _sparse_names(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, owner in module.named_modules()
        if getattr(owner, "sparse", False)
    }
