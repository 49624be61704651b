"""The contract of backends as a test suite, also for a backend of your own.

`CASES` names the parts of the contract in `stretto.runtime.backends.base`. `check_case`
starts the ranks of one and raises if one of them does not hold:

    @pytest.mark.parametrize("case", CASES)
    def test_my_backend(case):
        check_case(case, backend="mine", setup="my_package.my_backend")

``setup`` is a module that every rank imports first, for instance one that registers the
backend; a backend that is an entry point needs none. `run_case` runs a case in a rank
that has a process group. The checks themselves are in `_backend_cases`.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stretto.lab.ports import free_port
from stretto.testing import _backend_cases as cases
from stretto.testing._backend_bench import BackendBench, Case

CASES: dict[str, Case] = {
    "sums of two ranks": Case(cases.sums),
    "sums of three ranks": Case(cases.sums, ranks=3),
    "sums of four ranks": Case(cases.sums, ranks=4),
    "minimum, maximum, product, and": Case(cases.operations),
    "infinity and NaN": Case(cases.not_finite),
    "collectives of a lane in order": Case(cases.in_order),
    "slices in flight": Case(cases.slices),
    "lanes at once": Case(cases.lanes_at_once, ranks=3, on_streams=False),
    "other collectives": Case(cases.other_collectives, ranks=3),
    "a barrier": Case(cases.barrier, ranks=3, on_streams=False),
    "futures and callbacks": Case(cases.futures),
    "resources of a lane": Case(cases.resources),
    "retain": Case(cases.retain),
    "retain frees": Case(cases.retain_frees, on_streams=False),
    "close with collectives queued": Case(cases.close_queued, on_streams=False),
    "close on one rank": Case(cases.close_alone, on_streams=False),
    "nothing is left": Case(cases.reopened, on_streams=False),
    "abort": Case(cases.abort, on_streams=False),
    "a late rank": Case(cases.late_rank, on_streams=False),
    "a dead rank": Case(cases.dead_rank, ranks=3, on_streams=False, dies=2),
    "a rank dead before opening": Case(
        cases.dead_before_opening, ranks=3, on_streams=False, dies=2
    ),
    "a planned model": Case(cases.model),
}
"""Parts of the contract, by name."""


def run_case(name: str, *, backend: str, device: str = "cpu") -> None:
    """Run a case in one rank of a process group of as many ranks as it needs.

    Raises:
        AssertionError: the backend breaks the contract.
    """
    CASES[name].check(BackendBench(backend, torch.device(device)))


def check_case(
    name: str,
    *,
    backend: str,
    setup: str | None = None,
    group: str = "gloo",
    device: str = "cpu",
    timeout_s: float = 180.0,
) -> None:
    """Start the ranks of a case as processes on this host, and require that it holds.

    Args:
        name: A key of `CASES`.
        backend: The backend under test.
        setup: A module that every rank imports first.
        group: The backend of the process group, for everything but lanes.
        device: The type of device of tensors.
        timeout_s: Time for all ranks to end, their start included.

    Raises:
        AssertionError: with the traceback of each rank that failed.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case.ranks, free_port(), folder, name, backend, setup)
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_main, args=(rank, *arguments, group, device))
            for rank in range(case.ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.perf_counter() + timeout_s
        for process in processes:
            process.join(max(0.1, deadline - time.perf_counter()))
        failed = []
        for rank, process in enumerate(processes):
            is_late = process.is_alive()
            if is_late:
                process.kill()
                process.join()
            report = Path(folder, str(rank))
            if report.exists():
                failed.append(f"--- rank {rank}\n{report.read_text()}")
            elif is_late:
                failed.append(f"--- rank {rank} did not end within {timeout_s:g} s")
            elif process.exitcode != 0 and rank != case.dies:
                failed.append(f"--- rank {rank} ended with {process.exitcode}")
    if failed:
        raise AssertionError(
            f"backend {backend!r} breaks the contract in {name!r}:\n"
            + "\n".join(failed)
        )


def _main(
    rank: int,
    size: int,
    port: int,
    folder: str,
    name: str,
    backend: str,
    setup: str | None,
    group: str,
    device: str,
) -> None:
    torch.set_num_threads(1)
    try:
        if setup is not None:
            importlib.import_module(setup)
        dist.init_process_group(
            group,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        run_case(name, backend=backend, device=device)
    except BaseException:  # noqa: BLE001 - the parent reports it
        Path(folder, str(rank)).write_text(traceback.format_exc())
    if rank == 0:
        time.sleep(1.0)  # it holds the store, in which others may still read
    # Not by the interpreter's own end: a peer may have died on purpose.
    os._exit(0)
