"""Random faults in one elastic job: do other ranks continue, equal, as the oracle does?

A job of 3 ranks under a keeper loses a rank at random moments, sometimes two at once,
by SIGKILL, SIGSTOP or SIGTERM, drawn from ``--seed``. Lost ranks are replaced; after
SIGTERM, which lets a rank leave in order and is not followed by a replacement, the next
job begins. Ranks are forked from a keeper that has imported torch, so a fault costs a
fraction of a second instead of a start.

The oracle: after each fault further steps are committed within a bound; every step has
one sum over the parameters, whichever member reports it; and losses are within 1e-6 of
those of one process that trains with the same memberships.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from _forks import prepare
from _record import store

RANKS, SAMPLES, BATCH = 3, 211, 24
BOUND_S = {"SIGKILL": 10.0, "SIGSTOP": 15.0, "SIGTERM": 10.0}
"""On a busy machine; targets are 1 s plus two steps, and 5 s for a stopped rank."""

KINDS = ("SIGKILL",) * 36 + ("SIGSTOP",) * 2 + ("SIGTERM",) * 2


def made() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.Linear(64, 5)
    ).double()
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(16, generator=generator).double(), i % 5) for i in range(SAMPLES)
    ]
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3), data


def loss_of(model: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(folder: Path) -> None:
    """Be a rank, until a file asks to end."""
    import torch.distributed as dist

    import stretto

    dist.init_process_group("gloo")
    net, optimizer, data = made()
    model = stretto.DistributedDataParallel(net, plan="ddp")
    run = stretto.Elastic(model, optimizer, batch=f"global:{BATCH}")
    faulthandler.register(signal.SIGUSR2)
    member = os.environ["STRETTO_MEMBER"]
    with (folder / f"{member}.jsonl").open("a", buffering=1) as file:
        print(json.dumps(os.getpid()), file=file)
        while not (folder / "end").exists():
            for batch in run.batches(data):
                before = run.steps
                with run.step() as step:
                    loss = loss_of(run.model, batch)
                    (loss * run.weight).backward()
                    optimizer.step()
                if step.is_committed:
                    total = sum(p.detach().sum().item() for p in net.parameters())
                    print(json.dumps([before, loss.item(), total]), file=file)
    history = [[m.generation, m.first_step, m.ids] for m in run.history]
    (folder / f"{member}.end").write_text(json.dumps(history))


def forked(command: Any, env: dict[str, str], preexec_fn: Any) -> Any:
    """Start a rank as `subprocess.Popen` would, without starting Python again."""
    pid = os.fork()
    if pid:
        return SimpleNamespace(pid=pid, returncode=None)
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, 1024)
        preexec_fn()
        os.environ.clear()
        os.environ.update(env)
        train(Path(command[0]))
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - a forked rank must not return
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def keep(folder: Path) -> NoReturn:
    """Be the keeper."""
    from stretto.members import keeper

    keeper._MAX_REPLACEMENTS = 1 << 20  # noqa: SLF001
    keeper.subprocess = SimpleNamespace(Popen=forked)  # type: ignore[attr-defined]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    job = keeper.ElasticJob(
        command=(str(folder),), ranks=RANKS, min_ranks=1, max_ranks=RANKS
    )
    os._exit(keeper.RankKeeper(job).run())


class Job:
    """A job, and what its members have reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: dict[int, int] = {}
        self.rows: dict[int, list[Any]] = {}
        self._at: dict[int, int] = {}
        self.keeper = os.fork()
        if not self.keeper:
            keep(folder)

    def look(self) -> None:
        for path in self.folder.glob("*.jsonl"):
            member = int(path.stem)
            with path.open() as file:
                file.seek(self._at.get(member, 0))
                while (line := file.readline()).endswith("\n"):
                    self._at[member] = file.tell()
                    row = json.loads(line)
                    if isinstance(row, int):
                        self.pids[member] = row
                    else:
                        self.rows.setdefault(member, []).append(row)

    def living(self) -> list[int]:
        """Return members that have trained and whose process runs."""
        self.look()
        return [m for m in self.rows if Path(f"/proc/{self.pids[m]}/stat").exists()]

    def wait(self, what: Any, limit_s: float) -> bool:
        end_s = time.perf_counter() + limit_s
        while time.perf_counter() < end_s:
            if what():
                return True
            time.sleep(0.005)
        return False

    def print_stacks(self) -> None:
        """Let every rank write its threads' stacks to the job's log."""
        self.look()
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(2.0)

    def steps(self) -> int:
        self.look()
        return max((rows[-1][0] for rows in self.rows.values()), default=-1)


def series(rng: random.Random, faults: int, seconds: float) -> dict[str, Any]:
    """Inject faults into one job."""
    folder = Path(tempfile.mkdtemp())
    job, each, wrong = Job(folder), [], []
    end_s = time.perf_counter() + seconds
    while len(each) < faults and time.perf_counter() < end_s and not wrong:
        if not job.wait(lambda: len(job.living()) == RANKS, 60.0):
            wrong.append("a replacement did not join in 60 s")
            job.print_stacks()
            break
        time.sleep(rng.uniform(0.0, 0.2))
        kind = rng.choice(KINDS)
        count = rng.choice((1, 1, 1, 2)) if kind == "SIGKILL" else 1
        victims = rng.sample(sorted(job.living()), count)
        for victim in victims:
            time.sleep(rng.choice((0.0, 0.0, rng.uniform(0.0, 0.05))))
            os.kill(job.pids[victim], getattr(signal, kind))
        others = [m for m in job.living() if m not in victims]
        began_s, step = time.perf_counter(), job.steps()

        def goes_on(others: list[int] = others, step: int = step) -> bool:
            # Two steps later, no step of the old membership is in flight.
            job.look()
            return all(job.rows[m][-1][0] > step + 2 for m in others)

        if not job.wait(goes_on, BOUND_S[kind]):
            wrong.append(f"fault {len(each)}: no step in {BOUND_S[kind]} s")
            job.print_stacks()
        each.append([kind, count, round(time.perf_counter() - began_s, 3)])
        if kind == "SIGTERM":
            break
    (folder / "end").touch()
    ended = job.wait(lambda: os.waitpid(job.keeper, os.WNOHANG)[0], 60.0)
    if not ended:
        wrong.append("the job did not end in 60 s")
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.keeper, signal.SIGKILL)
    job.look()
    checked = check(job, wrong)
    if wrong:
        shutil.copy(folder / "log", f"/tmp/elastic_faults_{job.keeper}.log")
    shutil.rmtree(folder)
    return {"each": each, "wrong": wrong, **checked}


def check(job: Job, wrong: list[str]) -> dict[str, Any]:
    """Compare sums and losses, in a forked process: this one must not use torch."""
    histories = [json.loads(p.read_text()) for p in job.folder.glob("*.end")]
    if not histories:
        wrong.append("no member has ended")
        return {}
    rows = {m: r for m, r in job.rows.items() if r}
    result = job.folder / "compared"
    pid = os.fork()
    if not pid:
        try:
            result.write_text(json.dumps(compared(max(histories, key=len), rows)))
        except BaseException:  # noqa: BLE001 - a forked process must not return
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)
    if not result.exists():
        wrong.append("the comparison failed")
        return {}
    found: dict[str, Any] = json.loads(result.read_text())
    if found["unequal_steps"] or found["missing_steps"] or found["worst_loss"] > 1e-6:
        wrong.append(json.dumps(found))
    return found


def compared(history: list[Any], rows: dict[int, list[Any]]) -> dict[str, Any]:
    """Return how a job's steps differ from those of one process."""
    from stretto.elastic.training import Membership
    from stretto.testing import replay_memberships

    sums: dict[int, float] = {}
    unequal: set[int] = set()
    for each in rows.values():
        for step, _, total in each:
            if sums.setdefault(step, total) != total:
                unequal.add(step)
    net, optimizer, data = made()
    steps = max(sums) + 1
    wanted = replay_memberships(
        net,
        optimizer,
        data,
        loss_of,
        history=[
            Membership(generation=g, first_step=first, ids=tuple(ids))
            for g, first, ids in history
        ],
        steps=steps,
        batch=f"global:{BATCH}",
    )
    worst = max(
        abs(loss - wanted[step][member])
        for member, each in rows.items()
        for step, loss, _ in each
        if member in wanted[step]
    )
    return {
        "memberships": len(history),
        "steps": steps,
        "unequal_steps": len(unequal),
        "missing_steps": steps - len(sums),
        "worst_loss": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after this")
    parser.add_argument("--no-store", action="store_true")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    prepare()
    rng, jobs = random.Random(chosen.seed), []
    end_s = time.perf_counter() + chosen.seconds
    left = chosen.faults
    while left > 0 and (seconds := end_s - time.perf_counter()) > 0:
        jobs.append(series(rng, left, seconds))
        left -= len(jobs[-1]["each"])
        print(len(jobs[-1]["each"]), {**jobs[-1], "each": None}, flush=True)
    each = [row for job in jobs for row in job["each"]]
    took = {
        kind: [row[2] for row in each if row[0] == kind] for kind in sorted(BOUND_S)
    }
    wrong = [text for job in jobs for text in job["wrong"]]
    summary = {
        "what": "random faults in elastic jobs of 3 ranks: seconds until the others "
        "have committed three further steps",
        "reach": "none wrong",
        "faults": len(each),
        "lost_ranks": sum(row[1] for row in each),
        "wrong": len(wrong),
        "why": wrong,
        "memberships": sum(job.get("memberships", 0) for job in jobs),
        "steps": sum(job.get("steps", 0) for job in jobs),
        "unequal_steps": sum(job.get("unequal_steps", 0) for job in jobs),
        "worst_loss": max((job.get("worst_loss", 0.0) for job in jobs), default=0.0),
        "by_kind": {
            kind: {
                "faults": len(rows),
                "median_s": statistics.median(rows),
                "slowest_s": max(rows),
            }
            for kind, rows in took.items()
            if rows
        },
    }
    print(json.dumps(summary, indent=1))
    if not chosen.no_store:
        store("elastic_faults", summary)


if __name__ == "__main__":
    main()
