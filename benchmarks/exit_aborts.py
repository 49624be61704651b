"""Check how programs end beside two busy loops: with their own exit status, or aborted.

Each program trains with 2 ranks and ends in one of five ways, in one of four states.
The result counts processes that end with another status than the program's own.
``--torch`` trains with PyTorch's DDP instead, for comparison; ``--rounds N`` repeats
everything.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _forks import prepare, run_as_script, start, wait
from _record import store
from stretto.lab.ports import free_port

SIZE = 2
LIMIT_S = 60.0

ENDINGS = {
    "destroy_process_group": 0,
    "exception between steps": 1,
    "exception in backward": 1,
    "sys.exit(3)": 3,
    "plain end": 0,
}
STATES = {"tuned": 14, "while tuning": 5, "lanes open": 4, "negotiated": 4}

BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(10000))
"""


def program(rank: int, size: int, state: str, ending: str, torch_only: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
    )
    model = nn.parallel.DistributedDataParallel(module)
    if not torch_only:
        model = wrapped(module, state, size)
    for _ in range(STATES[state]):
        model(torch.randn(4, 64)).sum().backward()
    if ending == "exception in backward":

        def fail(_gradient: object) -> None:
            raise ValueError("mine")

        # The last gradients: the first buckets are being sent.
        module[0].weight.register_hook(fail)
        model(torch.randn(4, 64)).sum().backward()
    if ending == "exception between steps":
        raise ValueError("mine")
    if ending == "sys.exit(3)":
        sys.exit(3)
    if ending == "destroy_process_group":
        dist.destroy_process_group()


def wrapped(module: object, state: str, size: int) -> object:
    import stretto
    from _plans import two_lanes

    if state == "negotiated":
        return stretto.DDP(module, plan=None, order="negotiated")
    if state != "lanes open":
        return stretto.DDP(module)
    return stretto.DDP(module, plan=two_lanes(module, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare()
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(os.getpid())])
        for _ in range(2)
    ]
    other: list[dict] = []
    counts: collections.Counter = collections.Counter()
    # Not a context manager: a forked rank leaves this function through an exception.
    folder = tempfile.mkdtemp()
    for _ in range(chosen.rounds):
        for state in STATES if not chosen.torch else ("lanes open",):
            for ending, status in ENDINGS.items():
                logs = [Path(folder) / f"{rank}.log" for rank in range(SIZE)]
                pids = start(
                    program,
                    SIZE,
                    free_port(),
                    logs,
                    state,
                    ending,
                    chosen.torch,
                    STRETTO_TUNE_SCHEDULE="forced",
                )
                found = wait(pids, LIMIT_S)
                for rank in range(SIZE):
                    mine = found.get(rank, (None, 0.0))[0]
                    text = logs[rank].read_text(errors="replace")
                    counts["processes"] += 1
                    counts["aborted"] += "terminate called" in text or mine == -6
                    counts["hung"] += mine is None
                    if mine != status or "terminate called" in text:
                        row = {"state": state, "ending": ending, "rank": rank}
                        other.append({**row, "status": mine, "log": text[-1500:]})
                print(state, "|", ending, "|", [r[0] for r in found.values()])
    shutil.rmtree(folder)
    for process in busy:
        process.kill()
        process.wait()
    name = "exit_aborts_torch" if chosen.torch else "exit_aborts"
    store(
        name,
        {
            "what": "processes that did not end with their program's own status",
            "reach": "0 aborted of 60",
            **counts,
            "other_status": other,
        },
    )


if __name__ == "__main__":
    run_as_script(main)
