"""`horovod.run`: calls a function on every rank of a new job."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_HERE = frozenset({"localhost", "127.0.0.1"})
_WITHOUT_EFFECT = frozenset(
    {
        *("start_timeout", "ssh_port", "ssh_identity_file", "disable_cache"),
        *("output_filename", "verbose", "use_gloo", "use_mpi", "mpi_args"),
        *("network_interfaces", "executable", "prefix_output_with_timestamp"),
        *("np", "min_np", "max_np"),
    }
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    **others: Any,
) -> list[Any]:
    """What every rank returned, by rank.

    Starts ranks on this host, by torchrun's agent, in new processes that import the
    module of ``func``. For other hosts start a script there by torchrun or ``stretto
    run``.

    Args:
        func: A function of a module, which pickles by its name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks.
        min_num_proc: As ``num_proc``, if that is not given.
        max_num_proc: As ``num_proc``, if neither is given.
        slots: As ``num_proc``, if none is given; else the most it may be.
        reset_limit: How often ranks are all started again after one has failed.
        cooldown_range: Has no effect: nothing but this host is waited for.
        hosts: ``localhost:N``, with N the most that ``num_proc`` may be.
        hostfile: Refused.
        others: Horovod's further options, which choose between launchers and libraries
            that are not here and have no effect; ``np`` is ``num_proc``.

    Raises:
        TypeError: an option is none of Horovod's.
        ValueError: a number is less than 1 or more than the slots, another host is
            named, MPI is asked for, or the function or an argument can't be pickled.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank
            failed; with its traceback.
    """
    del cooldown_range
    unknown = sorted(others.keys() - _WITHOUT_EFFECT)
    if unknown:
        raise TypeError(f"run() got unexpected arguments: {', '.join(unknown)}")
    if others.get("use_mpi"):
        raise SpecError("run: there is no MPI here. Leave use_mpi out: Gloo is used.")
    # The older names.
    num_proc = num_proc or others.get("np")
    if hostfile is not None:
        raise _elsewhere(f"hostfile={hostfile!r}")
    if hosts is not None:
        host, _, most = hosts.partition(":")
        if host not in _HERE:
            raise _elsewhere(f"hosts={hosts!r}")
        slots = int(most) if most else slots
    ranks = num_proc or min_num_proc or max_num_proc or slots or 1
    if ranks < 1 or (slots is not None and ranks > slots):
        raise SpecError(
            f"num_proc must be from 1 to the number of slots ({slots}), got {ranks}"
        )
    try:
        pickle.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise SpecError(
            "run: the function and its arguments go to new processes and must be "
            f"picklable: {exc}. Define the function at the top of a module."
        ) from exc
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
        "script by torchrun or `stretto run`, with --nnodes and --rdzv-endpoint."
    )
