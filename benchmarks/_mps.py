"""Start a separate daemon of NVIDIA's MPS, for a benchmark."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def mps_daemon(program: str, *, check: bool) -> Iterator[tuple[dict[str, str], int]]:
    """Run a daemon; yield its clients' variables and the exit status of its start.

    Args:
        program: the path of ``nvidia-cuda-mps-control``.
        check: whether a start that fails is an error.
    """
    folder = tempfile.mkdtemp()
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
    }
    for path in environment.values():
        Path(path).mkdir()
    own = {**os.environ, **environment}
    started = subprocess.run(
        [program, "-d"],
        env=own,
        capture_output=True,
        text=True,
        timeout=30,
        check=check,
    )
    try:
        yield environment, started.returncode
    finally:
        subprocess.run(
            [program], input="quit\n", env=own, text=True, timeout=30, check=False
        )
