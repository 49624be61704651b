"""However a program ends: its own exit status, and no abort in finalization."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.lab.ports import free_port
from stretto.runtime.quiesce import quiesce

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux"),
]

# Gloo's workers run only when nothing else wants the processor, so that each may still
# have to drop its last work when the program ends. How many such processes abort
# without the wait at exit depends on the machine; the tests of `quiesce` below do not.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import stretto

BUSY = '''
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
end = time.monotonic() + 60
while time.monotonic() < end and os.getppid() == int(sys.argv[2]):
    sum(range(10000))
'''

torch.set_num_threads(1)
way = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = stretto.DDP(nn.Linear(64, 8), plan=None)
x = torch.randn(4, 64)
model(x).sum().backward()
processors = sorted(os.sched_getaffinity(0))
processor = processors[rank % len(processors)]
for task in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), [processor])
    if (task / "comm").read_text().strip() == "pt_gloo_runloop":
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
busy = [sys.executable, "-S", "-c", BUSY, str(processor), str(os.getpid())]
subprocess.Popen(busy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if way == "dead peer" and rank == 1:
    os._exit(9)
model(x).sum().backward()
dist.all_reduce(torch.ones(4))
if way == "destroy":
    dist.destroy_process_group()
if way == "exit":
    sys.exit(5)
if way == "raise":
    raise ValueError("mine")
"""


def run_program(way: str) -> list[tuple[int, str]]:
    """Run two ranks; gives their exit statuses and what they printed."""
    port = free_port()
    processes = []
    try:
        for rank in range(2):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, way],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        ended = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(p.returncode, text) for p, text in zip(processes, ended, strict=True)]


@pytest.mark.parametrize(
    ("way", "statuses"),
    [
        ("destroy", (0, 0)),
        ("exit", (5, 5)),
        ("raise", (1, 1)),
        ("dead peer", (1, 9)),
    ],
)
def test_a_program_keeps_its_exit_status_while_workers_lag(
    way: str, statuses: tuple[int, int]
) -> None:
    found = run_program(way)
    assert tuple(status for status, _ in found) == statuses, found
    if way == "raise":
        assert "ValueError: mine" in found[0][1]
    if way == "dead peer":
        assert "rank 1 is gone" in found[0][1]


WAITING = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)  # rank 1 does not join
    raise ValueError("mine")
time.sleep(60)
"""


def test_a_rank_that_fails_does_not_wait_for_collectives_of_others(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITING)
    begin_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "run", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "ValueError: mine" in done.stderr
    assert time.monotonic() - begin_s < 55


def named_worker(work: Any) -> threading.Thread:
    """Run ``work`` in a thread that looks like one of Gloo's workers."""
    named = threading.Event()

    def run() -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        task.write_text("pt_gloo_runloop")
        named.set()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    return thread


def test_the_wait_lasts_while_a_worker_runs_and_no_longer() -> None:
    ended: list[float] = []
    sleeping = threading.Event()

    def work() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        ended.append(time.monotonic())
        sleeping.wait()  # as an idle worker, or one whose peer is gone

    thread = named_worker(work)
    try:
        assert quiesce(60.0)
        assert ended
    finally:
        sleeping.set()
        thread.join()


def test_a_worker_that_never_rests_is_not_waited_for_beyond_the_limit() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = named_worker(work)
    try:
        assert not quiesce(0.3)
    finally:
        stop.set()
        thread.join()
