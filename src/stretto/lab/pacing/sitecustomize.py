# It runs in every Python process of a rank, so it does not import pathlib.
# ruff: noqa: PTH115, PTH120, PTH208
"""Cap every TCP connection of a Python process that has this folder on its path.

``site`` imports this module before the program. A thread looks for new sockets and sets
SO_MAX_PACING_RATE on them; the kernel then paces TCP itself, without a queueing
discipline and without privileges. To cover sockets that C++ code opened as well, the
thread looks at descriptors rather than at Python's sockets.
"""

import os
import socket
import threading
import time

_SO_MAX_PACING_RATE = 47
_SCAN_PERIOD_S = 0.05


def _pace_new_sockets(rate_bytes_per_s: int, paced: dict[int, str]) -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:"):
                paced.pop(fd, None)
                continue
            # The inode distinguishes a new socket with a reused descriptor.
            if paced.get(fd) == target:
                continue
            paced[fd] = target
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.type == socket.SOCK_STREAM and found.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    found.setsockopt(
                        socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate_bytes_per_s
                    )
        except OSError:
            # It was closed in the meantime.
            continue


def _pace_forever(rate_bytes_per_s: int) -> None:
    paced: dict[int, str] = {}
    while True:
        _pace_new_sockets(rate_bytes_per_s, paced)
        time.sleep(_SCAN_PERIOD_S)


def _run_shadowed_sitecustomize() -> None:
    """Run the ``sitecustomize`` that this file hides, if any."""
    # Every Python process of a lab runs this file, so it imports little at the top.
    import importlib.machinery
    import importlib.util
    import sys

    here = os.path.dirname(__file__)
    others = [entry for entry in sys.path if entry != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# `variable_names` spells it too: this file is not read as a part of the package.
_rate = os.environ.get("STRETTO_LAB_PACING_BYTES_PER_S")
if _rate:
    threading.Thread(
        target=_pace_forever, args=(int(_rate),), name="stretto-pacing", daemon=True
    ).start()
_run_shadowed_sitecustomize()
