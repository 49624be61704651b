"""Profile a model's layers on the ranks that train it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stretto.burst.profiling.host_costs import measure_host, slowdowns
from stretto.burst.profiling.layer_profile import profile, steps_of
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from torch import nn

    from stretto.schema.burst import LayerProfile


def profile_layers(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> LayerProfile:
    """Return a module's layer profile, measured on the ranks that train it. Collective.

    When ``torch.distributed`` is initialized, all ranks of the group must call this at
    the same point. If only some do, these exchange data with whatever the other ranks
    call next: they get wrong objects, or wait until the process group's timeout. Before
    it is initialized, one process measures the layers alone.

    The first rank measures the layers while the others wait. Then all ranks measure the
    executor's own calls, and how ranks that compute at the same time slow each other
    (``LayerProfile.host``); predictions include both. Every rank gets the same profile.

    Args:
        module: The module, on this rank's device.
        example_inputs: As for `stretto.burst.profile`.
        process_group: The ranks; all ranks of the job if ``None``.
        options: Options of `stretto.burst.profile`.

    Raises:
        SpecError, NoisyProfile: On every rank, the error of the first rank's `profile`.
        StrettoError: On other ranks, if the first one's `profile` raised another error.
        CommTimeout: A rank was lost.
    """
    if not dist.is_initialized():
        return profile(module, example_inputs, **options)

    group = process_group or dist.distributed_c10d._get_default_group()  # noqa: SLF001
    found: list[LayerProfile | StrettoError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            found = [profile(module, example_inputs, **options)]
        except StrettoError as exc:
            found = [exc]
        except Exception as exc:
            text = (str(exc) or type(exc).__name__).splitlines()[0]
            found = [
                StrettoError(f"rank 0 can't profile: {type(exc).__name__}: {text}")
            ]
            dist.broadcast_object_list(found, group=group, group_src=0)
            raise
    dist.broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], StrettoError):
        raise found[0]
    assert found[0] is not None  # noqa: S101 - the first rank has put it there
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with steps_of(module, example_inputs, **options) as (step, widths):
        slowed = slowdowns(group, device, step, widths)
    host = measure_host(group, device)
    return replace(found[0], host=replace(host, slowdowns=slowed))
