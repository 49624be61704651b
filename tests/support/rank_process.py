"""One rank of a test: started by itself, or forked by a server that imported torch.

Importing torch and what a step of training imports lazily takes seconds of processor
time per rank. A server imports once and forks one process for each request. There is
one server per rank, because ranks that were forked from one process would all iterate
over sets in the same order, and that hides defects.

The server reads one JSON object per line: ``{"run": [...], "environment": {...},
"log": path}``, and answers ``started PID`` and, when that process ends, ``ended PID
STATUS``.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

IMPORTED_FIRST = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.optim",
    "stretto",
    "stretto._api.ddp",
    "stretto.burst",
    "stretto.tune",
    "stretto.testing.models",
)


_RUNNING: set[int] = set()


def run(
    path: str, name: str, out: str, arguments: str, group_s: str, backend: str = "gloo"
) -> None:
    """Call the function `name` of the file `path` in a process group; never returns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Importing torch may take a minute on a busy machine: not within a timeout.
    mine = Path(out)
    outs = [
        mine.with_name(f"{mine.name.removesuffix(str(rank))}{r}") for r in range(size)
    ]
    mine.with_suffix(".ready").touch()
    while not all(other.with_suffix(".ready").exists() for other in outs):
        time.sleep(0.01)
    timeout = timedelta(seconds=float(group_s))
    if backend == "nccl":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    spec = importlib.util.spec_from_file_location("ranks_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    found: tuple[str, object]
    try:
        spec.loader.exec_module(module)
        more = pickle.loads(bytes.fromhex(arguments))
        value = getattr(module, name)(rank, size, *more)
        if backend == "nccl":
            torch.cuda.synchronize()
        found = ("value", value)
    except Exception as exc:  # noqa: BLE001 - the test decides
        found = ("error", (type(exc).__name__, str(exc), traceback.format_exc()))
    part = mine.with_suffix(".part")
    part.write_bytes(pickle.dumps(found))
    part.rename(mine)
    # Rank 0 holds the store: others may still read in it.
    if rank == 0:
        deadline = time.perf_counter() + 2.0
        while time.perf_counter() < deadline and not all(o.exists() for o in outs):
            time.sleep(0.005)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter's own end: a peer may have died on purpose.
    os._exit(0)


def serve() -> None:
    """Fork a process for each request until the other end closes the pipe."""
    for module in IMPORTED_FIRST:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"{threads} threads after the imports; forking would lose them")
    gc.freeze()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    print("ready", flush=True)
    pending = b""
    while True:
        readable = select.select([0, wake], [], [])[0]
        if wake in readable:
            os.read(wake, 4096)
            _reap()
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                for pid in _RUNNING:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _start(json.loads(line), (wake, waker))


def _start(request: dict[str, object], pipes: tuple[int, int]) -> None:
    pid = os.fork()
    if pid:
        _RUNNING.add(pid)
        print("started", pid, flush=True)
        return
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pipe in pipes:
            os.close(pipe)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        run(*request["run"])  # type: ignore[misc]
    except BaseException:  # noqa: BLE001 - a fork never returns into the server
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _RUNNING.discard(pid)
        print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    # Modules of tests import `support`, not what lies beside this file.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        run(*sys.argv[1:])
