"""Commands that run on every rank of a job: `stretto probe` and `stretto replay`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.network_interfaces import check_interfaces

if TYPE_CHECKING:
    from collections.abc import Iterator


def require_ranks(command: str) -> None:
    """Require a launcher's variables.

    Raises:
        SpecError: they are missing; the message says how to start the command.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise SpecError(
            f"stretto {command} runs on every rank of a cluster, but RANK and "
            "WORLD_SIZE are not set: start it with "
            f"`stretto lab run ... -- stretto {command} ...` or "
            f"`torchrun --no-python ... stretto {command} ...`"
        )


@contextmanager
def process_group() -> Iterator[int]:
    """Form the launcher's process group, and yield this process's rank in it.

    Raises:
        SpecError: a named network interface is missing.
    """
    check_interfaces(os.environ)
    # Imported here: a command's help must not wait for torch.
    import torch
    import torch.distributed as dist

    from stretto.runtime import backends

    usual = backends.on_this_machine()
    device = None
    if "cuda" in usual:
        usual["cuda"].prepare_process()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(usual.get("cuda", usual["cpu"]).name, device_id=device)
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()
