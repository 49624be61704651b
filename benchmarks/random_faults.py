"""Random faults in small training jobs: do survivors end in time and name the victim?

Each fault is a kind, a victim and a moment, drawn from ``--seed``. Kinds: SIGKILL,
SIGTERM, SIGSTOP, an exception, a MemoryError, ``os._exit``. Moments: seconds after the
start or after the model is built, a place in a step, or a call inside stretto (a
meeting, the opening of a lane, a probe, a change of plan). Jobs: ``plan="auto"`` on the
forced and on the usual schedule, an explicit plan, a negotiated order, the Horovod
interface, a burst plan; 2 or 3 ranks; group timeouts of 5, 30 and 1800 s.

The oracle: every survivor ends within the bound with status 1 and one CommTimeout that
names the victim and no other rank, and nothing aborts; if the victim had nothing left
to do, survivors end with status 0. Each fault that plain DDP can have too is also run
with DDP: whether its survivors fail, and after how long.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from _forks import prepare, run_as_script, start, wait
from _record import store
from stretto.lab.ports import free_port

STEPS = 40
PAUSE_S = 0.01

KINDS = ("SIGKILL", "SIGTERM", "SIGSTOP", "exception", "MemoryError", "os._exit")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
JOBS = ("forced", "forced", "forced", "usual", "plan", "negotiated", "horovod", "burst")

CALLS = {
    "the beginning of a meeting": (
        "stretto.tune.tuning_meeting",
        "TuningMeeting.begin",
    ),
    "a meeting": ("stretto.tune.tuning_meeting", "TuningMeeting.meet"),
    "the opening of a lane": ("stretto.runtime.backends.gloo", "GlooLanes._make"),
    "a change of plan": ("stretto.runtime", "DistributedDataParallel._change_plan"),
    "a probe": ("stretto.measure.network", "_Probe._agree"),
    "an agreement": ("stretto.runtime.agreement", "Agreement.require_same"),
}
CALLS_WITHOUT_TUNING = ("the opening of a lane", "an agreement")
PLACES = ("between steps", "forward", "backward", "after the last step")

DEAD_S = 12.0
"""Time within which survivors of a dead rank have ended, whatever the timeout,
including a roll call and Python's own end.
"""

STUCK_TIMEOUTS = 2.5
"""Survivors of a stopped rank wait for a meeting, then a collective."""


@dataclass(frozen=True)
class Fault:
    seed: int
    job: str
    size: int
    timeout_s: float
    kind: str
    victim: int
    place: str
    """A step or a call; for ``start`` and ``run``, ``when`` is seconds after it."""

    when: float
    """Number of the step or the call, or seconds."""

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.job}, {self.size} ranks, timeout "
            f"{self.timeout_s:g} s: {self.kind} of rank {self.victim} in {self.place} "
            f"{self.when:.3g}"
        )

    @property
    def bound_s(self) -> float:
        if self.kind == "SIGSTOP" or self.place == "start":
            return STUCK_TIMEOUTS * self.timeout_s + DEAD_S
        return DEAD_S


def draw(seed: int) -> Fault:
    rng = random.Random(seed)
    job = rng.choice(JOBS)
    size = rng.choice((2, 3))
    kind = rng.choice(KINDS)
    place = rng.choice(("start", "run", "run", "step", "step", "call", "call"))
    when = rng.uniform(0.0, 1.0 if place == "start" else 1.5)
    if place == "step":
        place, when = rng.choice(PLACES), rng.randrange(25)
    elif place == "call":
        tunes = job in ("forced", "usual")
        calls = [call for call in CALLS if tunes or call in CALLS_WITHOUT_TUNING]
        place, when = rng.choice(calls), rng.randrange(12 if tunes else 2)
    if place in ("start", "run") and kind not in SIGNALS:
        kind = rng.choice(SIGNALS)
    # A stopped rank, and one that is lost before it has identified itself, are detected
    # only at the timeout.
    short = kind == "SIGSTOP" or place == "start"
    timeout_s = 5.0 if short else rng.choice((5.0, 30.0, 1800.0))
    return Fault(seed, job, size, timeout_s, kind, rng.randrange(size), place, when)


# In a rank.


def strike(kind: str) -> None:
    if kind in SIGNALS:
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(60.0)
    if kind == "os._exit":
        os._exit(9)
    raise (MemoryError if kind == "MemoryError" else ValueError)("the fault")


def arm_call(fault: Fault) -> None:
    """Make the fault happen at a call inside stretto."""
    module_name, _, path = (CALLS[fault.place][0], "", CALLS[fault.place][1])
    __import__(module_name)
    owner_name, name = path.split(".")
    owner = getattr(sys.modules[module_name], owner_name, None)
    if owner is None or not hasattr(owner, name):
        return
    real = getattr(owner, name)
    calls = 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.when + 1:
            # An exception here would count as stretto's own, which stretto survives.
            strike(fault.kind if fault.kind in SIGNALS else "os._exit")
        return real(*args, **kwargs)

    setattr(owner, name, struck)


def program(rank: int, size: int, fault: Fault, ready: str, torch_only: bool) -> None:
    try:
        train(rank, size, fault, ready, torch_only)
    except Exception:
        print("raised at", time.perf_counter(), flush=True)
        raise


def train(rank: int, size: int, fault: Fault, ready: str, torch_only: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    mine = rank == fault.victim
    if mine and fault.place in CALLS and not torch_only:
        arm_call(fault)
    dist.init_process_group("gloo", timeout=timedelta(seconds=fault.timeout_s))
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)
    )
    job = "torch" if torch_only else fault.job
    model, optimizer = built(module, job, size)
    Path(f"{ready}{rank}").touch()
    for step in range(STEPS):
        if mine and fault.when == step:
            if fault.place == "between steps":
                strike(fault.kind)
            if fault.place == "forward":
                module[0].register_forward_pre_hook(lambda *_: strike(fault.kind))
            if fault.place == "backward":
                module[0].weight.register_hook(lambda _g: strike(fault.kind))
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(PAUSE_S)
    if mine and fault.place == "after the last step":
        strike(fault.kind)
    print("trained", flush=True)


def built(module: Any, job: str, size: int) -> tuple[Any, Any]:
    import torch
    from torch import nn

    import stretto

    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
    if job == "torch":
        return nn.parallel.DistributedDataParallel(module), optimizer
    if job == "horovod":
        import stretto.horovod.torch as hvd

        hvd.init()
        named = list(module.named_parameters())
        return module, hvd.DistributedOptimizer(optimizer, named_parameters=named)
    if job == "negotiated":
        return stretto.DDP(module, plan=None, order="negotiated"), optimizer
    if job == "burst":
        return burst(module, size), optimizer
    if job == "plan":
        from _plans import two_lanes

        return stretto.DDP(module, plan=two_lanes(module, size)), optimizer
    return stretto.DDP(module), optimizer


def burst(module: Any, size: int) -> Any:
    """Use every other layer on all ranks, the rest on the first rank."""
    import copy

    import torch

    from stretto.burst.executor import BurstParallel
    from stretto.burst.graph import capture
    from stretto.schema.burst import BurstPlan, LayerGpus

    example = torch.zeros(2, 64)
    graph = capture(copy.deepcopy(module), (example,))
    plan = BurstPlan(
        profile_digest=graph.digest,
        gpus=size,
        batch=8,
        amplification_limit=None,
        layers=tuple(
            LayerGpus(layer=node.name, first_gpu=0, gpus=1 if i % 2 else size)
            for i, node in enumerate(graph.nodes)
        ),
    )
    return BurstParallel(module, plan, example_inputs=(example,))


# In the parent.

_NAMED = re.compile(
    r"(?:^|[^\w])ranks? ([\d, ]+?) (?:is|are) (?:gone|late|stuck)|for (rank \d+) to "
    r"|(rank \d+)(?: did not (?:arrive|come|submit)| stopped with an error of its own"
    r"| closed its engine|'s process)"
)


def judged(fault: Fault, rank: int, status: int | None, log: str, took_s: float) -> str:
    """Return what is wrong with how a survivor ended; empty if nothing is."""
    if status is None:
        return f"did not end within {fault.bound_s:g} s of the fault"
    if "terminate called" in log or status < 0:
        return f"aborted (status {status})"
    if status == 0:
        return "" if "trained" in log else "ended with 0 without having trained"
    if fault.place == "start" and "DistStoreError" in log and "stretto/" not in log:
        return ""  # before a process group existed
    lines = [line for line in log.splitlines() if line.strip()]
    last = next(
        (
            line
            for line in reversed(lines)
            if re.search(r"(CommTimeout|HorovodInternalError|Error)\b.*: ", line)
        ),
        "",
    )
    if "CommTimeout" not in last and "HorovodInternalError" not in last:
        return f"its error is not stretto's: {last[:300]}"
    blamed = {
        int(number)
        for groups in _NAMED.findall(last)
        for number in re.findall(r"\d+", " ".join(groups))
    }
    if blamed != {fault.victim}:
        return f"names {sorted(blamed)}: {last[:500]}"
    return ""


def inflict(fault: Fault, folder: Path, torch_only: bool) -> dict[str, Any]:
    for old in folder.iterdir():
        old.unlink()
    logs = [folder / f"{rank}.log" for rank in range(fault.size)]
    ready = str(folder / "ready")
    environment = {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    if fault.job == "forced":
        environment["STRETTO_TUNE_SCHEDULE"] = "forced"
    pids = start(
        program,
        fault.size,
        free_port(),
        logs,
        fault,
        ready,
        torch_only,
        **environment,
    )
    began_s = time.perf_counter()
    struck_s: list[float] = []

    def tick() -> None:
        now_s = time.perf_counter()
        if struck_s or fault.place not in ("start", "run"):
            return
        since_s = began_s
        if fault.place == "run":
            if not all(Path(f"{ready}{r}").exists() for r in range(fault.size)):
                return
            run_since.append(now_s)
            since_s = run_since[0]
        if now_s - since_s >= fault.when:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[fault.victim], getattr(signal, fault.kind))
            struck_s.append(now_s)

    run_since: list[float] = []
    limit_s = 8.0 + fault.bound_s  # with a run's own length
    found: dict[int, tuple[int, float]] = {}
    found = wait(pids, limit_s, tick, ignore=fault.victim)
    if fault.victim in found and not struck_s:
        struck_s.append(found[fault.victim][1])
    rows = []
    for rank in range(fault.size):
        if rank == fault.victim:
            continue
        status, at_s = found.get(rank, (None, time.perf_counter()))
        log = logs[rank].read_text(errors="replace")
        took_s = at_s - struck_s[0] if struck_s else at_s - began_s
        wrong = "" if torch_only else judged(fault, rank, status, log, took_s)
        if not wrong and not torch_only and took_s > fault.bound_s:
            wrong = f"ended only {took_s:.1f} s after the fault"
        raised = re.search(r"^raised at (\S+)$", log, re.MULTILINE)
        raised_s = float(raised[1]) - (at_s - took_s) if raised else None
        rows.append(
            {
                "rank": rank,
                "status": status,
                "raised_s": raised_s and round(raised_s, 2),
                "ended_s": round(took_s, 2),
            }
        )
        if wrong:
            rows[-1] |= {"wrong": wrong}
    victim = found.get(fault.victim, (None, 0.0))[0]
    return {"victim_status": victim, "survivors": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--logs", action="store_true", help="of what is wrong")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare()
    # Not a context manager: a forked rank leaves this function through an exception.
    base = Path(tempfile.mkdtemp())
    folder = base / "ranks"
    folder.mkdir()
    faults, wrong = [], 0
    for seed in range(chosen.seed, chosen.seed + chosen.faults):
        fault = draw(seed)
        found = inflict(fault, folder, torch_only=False)
        plain = None
        if not chosen.no_torch and fault.place not in CALLS and fault.kind != "SIGSTOP":
            plain = inflict(fault, folder, torch_only=True)
        bad = [row for row in found["survivors"] if "wrong" in row]
        wrong += bool(bad)
        said = [
            (row["rank"], row["status"], row["raised_s"], row["ended_s"])
            for row in found["survivors"]
        ]
        theirs = plain and [(r["status"], r["ended_s"]) for r in plain["survivors"]]
        print(
            "WRONG" if bad else "ok   ", fault, said, "plain DDP:", theirs, flush=True
        )
        for row in bad:
            print("      rank", row["rank"], row["wrong"], flush=True)
        if bad and chosen.logs:
            for log in sorted(folder.glob("*.log")):
                print(log.name, log.read_text(errors="replace")[-3000:], flush=True)
        faults.append({**asdict(fault), **found, "plain_ddp": plain})
    shutil.rmtree(base)
    took = [r["ended_s"] for f in faults for r in f["survivors"] if r["status"] == 1]
    summary = {
        "what": "survivors of random faults: exit status, seconds after the fault",
        "reach": "none wrong",
        "faults": len(faults),
        "wrong": wrong,
        "failed_survivors": len(took),
        "slowest_s": max(took, default=0.0),
        "each": faults,
    }
    print(f"{len(faults)} faults, {wrong} wrong, slowest {summary['slowest_s']} s")
    if not chosen.no_store:
        store("random_faults", summary)


if __name__ == "__main__":
    run_as_script(main)
