"""Every name of the interface, and its arguments, as Horovod 0.28.1 has them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import stretto.horovod
import stretto.horovod.torch as hvd

ALLREDUCE = (
    "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, "
    "process_set=GLOBAL"
)
COMPRESSED = (
    "average=None, name=None, compression=NONE, op=None, prescale_factor=1.0, "
    "postscale_factor=1.0, process_set=GLOBAL"
)
SCATTERED = (
    "name=None, op=AVERAGE, process_set=GLOBAL, prescale_factor=1.0, "
    "postscale_factor=1.0"
)
SCATTERED_COMPRESSED = (
    "name=None, compression=NONE, op=AVERAGE, process_set=GLOBAL, prescale_factor=1.0, "
    "postscale_factor=1.0"
)
PLAIN = (
    *("shutdown", "is_initialized", "size", "rank", "local_size", "local_rank"),
    *("cross_size", "cross_rank", "is_homogeneous", "mpi_threads_supported"),
    *("mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built"),
    *("ddl_built", "ccl_built", "cuda_built", "rocm_built", "stop_timeline"),
)
SIGNATURES = {
    **dict.fromkeys(PLAIN, ""),
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_async": f"tensor, {ALLREDUCE}",
    "allreduce_": f"tensor, {ALLREDUCE}",
    "allreduce_async_": f"tensor, {ALLREDUCE}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {ALLREDUCE}",
    "grouped_allreduce_": f"tensors, {ALLREDUCE}",
    "grouped_allreduce_async_": f"tensors, {ALLREDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=GLOBAL",
    "allgather": "tensor, name=None, process_set=GLOBAL",
    "allgather_async": "tensor, name=None, process_set=GLOBAL",
    "grouped_allgather": "tensors, name=None, process_set=GLOBAL",
    "grouped_allgather_async": "tensors, name=None, process_set=GLOBAL",
    "broadcast": "tensor, root_rank, name=None, process_set=GLOBAL",
    "broadcast_async": "tensor, root_rank, name=None, process_set=GLOBAL",
    "broadcast_": "tensor, root_rank, name=None, process_set=GLOBAL",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=GLOBAL",
    "alltoall": "tensor, splits=None, name=None, process_set=GLOBAL",
    "alltoall_async": "tensor, splits=None, name=None, process_set=GLOBAL",
    "reducescatter": f"tensor, {SCATTERED_COMPRESSED}",
    "reducescatter_async": f"tensor, {SCATTERED}",
    "grouped_reducescatter": f"tensors, {SCATTERED_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {SCATTERED}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set=GLOBAL",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=GLOBAL",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=NONE, "
        "backward_passes_per_step=1, op=AVERAGE, gradient_predivide_factor=1.0, "
        "num_groups=0, groups=None, sparse_as_dense=False, process_set=GLOBAL"
    ),
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "SyncBatchNorm": (
        "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True"
    ),
    "Compression.none.compress": "tensor",
    "Compression.none.decompress": "tensor, ctx",
    "Compression.fp16.compress": "tensor",
    "Compression.fp16.decompress": "tensor, ctx",
    "elastic.run": "func",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
}
VALUES = (
    *("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression"),
    *("global_process_set", "elastic", "HorovodInternalError", "HostsUpdatedInterrupt"),
)
MPI_OPS = (
    *("allreduce_async_", "broadcast_async_", "allgather_async", "synchronize"),
    *("init", "rank", "size", "Average", "Sum", "Adasum", "poll", "join"),
)


def found(name: str) -> Any:
    value: Any = hvd
    for part in name.split("."):
        value = getattr(value, part)
    return value


def written(function: Any) -> str:
    """A signature as the table has it: without annotations."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        text = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        if parameter.default is not parameter.empty:
            default = {
                id(hvd.global_process_set): "GLOBAL",
                id(hvd.Compression.none): "NONE",
                id(hvd.Average): "AVERAGE",
            }.get(id(parameter.default), repr(parameter.default))
            text += f"={default}"
        parts.append(text)
    return ", ".join(parts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_has_horovods_arguments(name: str) -> None:
    assert written(found(name)) == SIGNATURES[name]


def test_the_table_is_whole() -> None:
    top = {name for name in SIGNATURES if "." not in name}
    assert top | set(VALUES) == set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_operations_have_the_module_that_scripts_import() -> None:
    mpi_ops = importlib.import_module("stretto.horovod.torch.mpi_ops")
    for name in MPI_OPS:
        assert getattr(mpi_ops, name) is getattr(hvd, name)


def test_horovod_run_takes_the_arguments_that_scripts_give() -> None:
    arguments = list(inspect.signature(stretto.horovod.run).parameters)
    assert arguments[:4] == ["func", "args", "kwargs", "num_proc"]


def test_reductions_have_horovods_numbers_and_errors_its_classes() -> None:
    ops = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert [int(op) for op in ops] == list(range(6))
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync


def test_before_init_there_is_no_rank() -> None:
    assert not hvd.is_initialized()
    hvd.shutdown()  # nothing to leave
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.join):
        with pytest.raises(ValueError, match="init"):
            ask()
