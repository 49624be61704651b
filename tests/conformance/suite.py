"""Runs PyTorch's tests of DDP on forked ranks, one test at a time.

Importing torch and its tests costs seconds, so it is done once: this process never
starts a thread or a process group, and each rank of each test is a fork of it. A rank
that does not end in time is killed and its test counts as failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import on_cpu

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_NAMED = re.compile("ddp|distributeddataparallel", re.IGNORECASE)


def run(
    *,
    folder: Path,
    size: int,
    forms: list[str] | None,
    names: list[str],
    one_bucket: Collection[str],
    timeout_s: float,
    part: tuple[int, int] = (0, 1),
) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """For each test and form what came of it and why: ``["passed", ""]``.

    What is ``passed``, ``skipped`` or ``failed``. The planned form runs the tests of
    ``one_bucket`` with a plan of one bucket. Of all tests of DDP, ``part`` (k, n) runs
    every n-th from the k-th on. Also returns the names of all of them.
    """
    tests = on_cpu.import_tests(size)
    import torch
    from forms import ENVIRONMENT, FORMS, OneBucket

    torch.set_num_threads(1)

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        """PyTorch's tests, bound as its own runner binds them."""

    found: dict[str, dict[str, list[str]]] = {}
    tests_of = sorted(n for n in dir(Case) if n.startswith("test"))
    every = [n for n in tests_of if (n in names if names else _NAMED.search(n))]
    for name in every[part[0] :: part[1]]:
        found[name] = {}
        for form, form_class in FORMS.items():
            kind = form_class
            if forms and form not in forms:
                continue
            if form == "planned" and name in one_bucket:
                kind = OneBucket
            found[name][form] = _on_ranks(
                Case,
                name,
                kind,
                folder=folder,
                size=size,
                timeout_s=timeout_s,
                environment=ENVIRONMENT.get(form, {}),
            )
            sys.stderr.write(f"{name} {form} {found[name][form][0]}\n")
    return found, every


def _on_ranks(
    case: Any,
    name: str,
    kind: Any,
    *,
    folder: Path,
    size: int,
    timeout_s: float,
    environment: dict[str, str],
) -> list[str]:
    why = getattr(getattr(case, name), "__unittest_skip_why__", None)
    if why is not None:
        return ["skipped", why]
    (folder / "barrier").mkdir(exist_ok=True)
    for old in [*folder.glob("rank*"), *folder.glob("store*")]:
        old.unlink()
    for old in (folder / "barrier").iterdir():
        old.unlink()
    children = {}
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            _be_rank(case, name, kind, rank, size, folder, timeout_s)
        children[rank] = child
    _wait(children, timeout_s)
    results = []
    for rank in range(size):
        out = folder / f"rank{rank}.json"
        if out.exists():
            results.append(json.loads(out.read_text()))
        else:
            stacks = (folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
            why = f"{stacks}\nrank {rank} did not end in {timeout_s:g} s"
            results.append(["failed", why])
    for what in ("failed", "skipped"):
        for result in results:
            if result[0] == what:
                return result
    return ["passed", ""]


def _wait(children: dict[int, int], timeout_s: float) -> None:
    deadline = time.perf_counter() + timeout_s
    left = set(children.values())
    while left and time.perf_counter() < deadline:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0]:
                left.discard(child)
        time.sleep(0.01)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_rank(
    case: Any,
    name: str,
    kind: Any,
    rank: int,
    size: int,
    folder: Path,
    timeout_s: float,
) -> None:
    """One rank of one test; never returns."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.distributed_test as tests
    from torch.testing._internal.common_utils import set_rng_seed

    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(0.9 * timeout_s)
    torch.nn.parallel.DistributedDataParallel = kind
    tests.DistributedDataParallel = kind
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            world_size=size,
            rank=rank,
            timeout=timedelta(seconds=timeout_s),
        )
        test = case(name)
        test.rank = rank
        test.file_name = str(folder / "store")
        test._barrier()
        set_rng_seed()
        getattr(test, name)()
        test._barrier()
        result = ["passed", ""]
    except unittest.SkipTest as exc:
        result = ["skipped", str(exc)]
    except SystemExit as exc:
        result = ["skipped", f"left with status {exc.code}"]
    except BaseException:  # noqa: BLE001
        result = ["failed", traceback.format_exc()]
    out = folder / f"rank{rank}.json"
    out.with_suffix(".part").write_text(json.dumps(result))
    out.with_suffix(".part").rename(out)
    os._exit(0)
