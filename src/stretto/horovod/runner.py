"""`horovod.run`: call a function on every rank of a new job."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_HERE = frozenset({"localhost", "127.0.0.1"})


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,  # noqa: FBT001
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,  # noqa: FBT001
    use_mpi: bool | None = None,  # noqa: FBT001
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function on new ranks, and return every rank's result, by rank.

    Start ranks on this host, with torchrun's agent, in new processes that import the
    module of ``func``. For other hosts start a script there with torchrun or ``stretto
    run``.

    Args:
        func: A module-level function, which is pickled by name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks.
        min_num_proc: Has no effect: this host has either all ranks or none.
        max_num_proc: Has no effect.
        slots: Maximum of ``num_proc``.
        reset_limit: How often all ranks are restarted after one has failed.
        cooldown_range: Has no effect: there is no wait for other hosts.
        hosts: ``localhost:N``, with N the maximum of ``num_proc``.
        hostfile: Refused.
        start_timeout: Has no effect, as the arguments below unless stated.
        ssh_port: ssh is not used.
        ssh_identity_file: ssh is not used.
        disable_cache: Nothing is checked in advance.
        output_filename: Ranks write to this process's output.
        verbose: Use logging.
        use_gloo: Gloo is used on CPUs.
        use_mpi: Refused if true.
        mpi_args: MPI is not used.
        network_interface: Set GLOO_SOCKET_IFNAME.
        executable: This interpreter is used.
        np: Older name of ``num_proc``.
        min_np: Has no effect.
        max_np: Has no effect.

    Raises:
        ValueError: a number is less than 1 or more than the slots, another host is
            named, MPI is requested, or the function or an argument can't be pickled.
            torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank
            failed; with its traceback.
    """
    del cooldown_range, min_num_proc, max_num_proc, min_np, max_np, start_timeout
    del ssh_port, ssh_identity_file, disable_cache, output_filename, verbose, use_gloo
    del mpi_args, network_interface, executable
    if use_mpi:
        raise SpecError("run: MPI is not supported. Leave use_mpi out: Gloo is used.")
    if hostfile is not None:
        raise _elsewhere(f"hostfile={hostfile!r}")
    if hosts is not None:
        host, _, slots_text = hosts.partition(":")
        if host not in _HERE:
            raise _elsewhere(f"hosts={hosts!r}")
        slots = int(slots_text) if slots_text else slots
    ranks = num_proc if np is None else np
    if ranks < 1 or (slots is not None and ranks > slots):
        raise SpecError(
            f"num_proc must be from 1 to the number of slots ({slots}), got {ranks}"
        )
    try:
        pickle.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise SpecError(
            "run: the function and its arguments are sent to new processes and must be "
            f"picklable: {exc}. Define the function at the top of a module."
        ) from exc
    # Takes 0.1 s to import, and programs that a launcher starts do not need it.
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"horovod-run-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=reset_limit or 0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    found = elastic_launch(config, entrypoint=_call)(func, tuple(args), kwargs or {})
    return [found[rank] for rank in range(ranks)]


def _call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return func(*args, **kwargs)


def _elsewhere(what: str) -> SpecError:
    return SpecError(
        f"run starts ranks on this host only, got {what}. On several hosts start a "
        "script with torchrun or `stretto run`, with --nnodes and --rdzv-endpoint."
    )
