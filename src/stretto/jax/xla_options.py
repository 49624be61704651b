"""XLA's own settings, for programs that leave communication to XLA."""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from stretto.errors import SpecError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.schema import Plan, Workload

_log = get_logger(__name__)

_DISABLED_PASSES = "xla_disable_hlo_passes"

_CPU_COMBINER = "cpu-all-reduce-combiner"
"""Joins all all-reduces of a CPU program, whatever their size, into one."""

_GPU_THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"

_GPU_SCHEDULER = {
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    "xla_gpu_enable_pipelined_all_reduce": "True",
    "xla_gpu_enable_analytical_sol_latency_estimator": "True",
}


def compile_options(
    *,
    bucket_bytes: int | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
) -> dict[str, str]:
    """Return compiler options with which XLA's own all-reduces overlap with backward.

    For programs that leave communication to XLA: `jax.jit` over a global mesh, with
    shardings or ``jax.shard_map``. Pass the result as ``compiler_options`` of the
    outermost `jax.jit`. It needs no `init`; call it after
    ``jax.distributed.initialize()``, because it compiles a small function to find out
    which options this version of XLA has. Others are left out, with one log line.

    On CPU XLA joins the gradients of all sizes into one all-reduce, which begins when
    backward has ended; the option ends that. XLA has no bucket size there. On GPU, the
    options are the bucket size, if one is given, and XLA's scheduler for overlap. They
    compile on a GPU; what they gain there has not been measured. For other devices the
    result is empty.

    Args:
        bucket_bytes: The size up to which XLA joins gradients, in bytes.
        plan: A plan whose largest bucket is that size, with its workload. XLA has no
            lanes and slices.
        workload: The plan's workload.

    Raises:
        SpecError: ``bucket_bytes`` is below 1 or given with a plan, or a plan or a
            workload is given alone.
        PlanMismatch: the plan was made for another workload.
    """
    size = _bucket_size(bucket_bytes, plan, workload)
    backend = jax.default_backend()
    wanted: dict[str, str] = {}
    if backend == "cpu":
        passes = [*_disabled_passes(os.environ), _CPU_COMBINER]
        wanted[_DISABLED_PASSES] = ",".join(dict.fromkeys(passes))
    elif backend == "gpu":
        if size is not None:
            wanted[_GPU_THRESHOLD] = str(size)
        wanted |= _GPU_SCHEDULER
    found = {key: value for key, value in wanted.items() if _is_accepted(key, value)}
    if len(found) < len(wanted):
        _log.warning(
            "XLA of JAX %s doesn't accept %s: left out",
            jax.__version__,
            ", ".join(f"{k}={v}" for k, v in wanted.items() if k not in found),
        )
    return found


def _bucket_size(
    bucket_bytes: int | None, plan: Plan | None, workload: Workload | None
) -> int | None:
    if (plan is None) != (workload is None):
        raise SpecError(
            "plan= and workload= belong together: a plan names tensors, and its "
            "workload has their sizes"
        )
    if plan is None or workload is None:
        if bucket_bytes is not None and bucket_bytes < 1:
            raise SpecError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
        return bucket_bytes
    if bucket_bytes is not None:
        raise SpecError("pass bucket_bytes= or plan=, not both")
    plan.check_matches(workload)
    sizes = {tensor.name: tensor.bytes for tensor in workload.tensors}
    return max(sum(sizes[name] for name in b.tensors) for b in plan.buckets) or None


def _disabled_passes(environment: Mapping[str, str]) -> list[str]:
    """Return the passes that XLA_FLAGS disables, which an option would enable again."""
    flags = environment.get("XLA_FLAGS", "")
    lists = re.findall(rf"--{_DISABLED_PASSES}=[\"']?([^\s\"']+)", flags)
    return [name for names in lists for name in names.split(",") if name]


@functools.cache
def _is_accepted(key: str, value: str) -> bool:
    def probe(x: jax.Array) -> jax.Array:
        return x + 1

    lowered = jax.jit(probe).lower(jax.ShapeDtypeStruct((), jnp.float32))
    try:
        lowered.compile(compiler_options={key: value})
    except Exception as exc:  # noqa: BLE001 - XLA's error has no public class
        _log.debug("XLA option %s=%s: %s", key, value, exc)
        return False
    return True
