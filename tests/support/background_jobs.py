"""One of two processes that share a device: ``foreground`` or ``background``.

Started by tests as a program with JSON arguments; prints JSON lines. Sleep stands for
device time, so that results hold on a busy machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from dataclasses import asdict

import stretto
from stretto.background.pacing import Policy


def say(**row):
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def foreground(device, segments, steps, die_after=None):
    """Run steps of (compute_s, wait_s) segments; print when each begins and ends."""
    job = stretto.Foreground(device)
    say(ready=True)
    for step in range(steps):
        begin_s = time.perf_counter()
        job.step()
        for compute_s, wait_s in segments:
            time.sleep(compute_s)
            with job.waiting("network"):
                time.sleep(wait_s)
        say(step=step, seconds=time.perf_counter() - begin_s, read=job.is_read)
        if die_after is not None and step >= die_after:
            os._exit(9)
    job.close()
    say(done=True)


def background(device, task_s, hang_after=None, pair=False, **options):
    """Run tasks until the input ends; print the pair if asked for, and the totals."""
    if "policy" in options:
        options["policy"] = Policy[options["policy"]]
    job = stretto.Background(device, isolates=False, **options)
    say(ready=True)
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        if not job.wait(timeout_s=0.2):
            continue
        if hang_after is not None and job.statistics.tasks >= hang_after:
            say(hangs=True)
            time.sleep(600)
        time.sleep(task_s)
        job.end_task()
    found = job.statistics
    if pair:
        say(pair=asdict(job.measured_pair("first", "second")))
    job.close()
    say(tasks=found.tasks, running_s=found.running_s, loss=found.loss)


if __name__ == "__main__":
    # These sleep most of the time; where permitted, they wake on time on any machine.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    {"foreground": foreground, "background": background}[sys.argv[1]](
        **json.loads(sys.argv[2])
    )
