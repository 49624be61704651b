"""Compare generated training programs with DDP, on several ranks.

    .venv/bin/python benchmarks/generated_programs.py --ranks 2 3 --programs 500

Ranks are processes that run one program after another. If they make no progress, they
are ended, the program counts as hanging, and new ranks continue after it. The result is
stored in ``benchmarks/results/generated_programs.json``. With ``--first N`` the
programs begin at number N; ``--as-users`` leaves tuning's own schedule in place.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import stretto
from stretto.lab.ports import free_port

HERE = Path(__file__).parent
RESULT = HERE / "results" / "generated_programs.json"

STALLED_S = 240.0
"""Ranks that end no program for this long hang."""


def be_rank(folder: Path, first: int, last: int, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from stretto.testing.programs import compared

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    with (folder / f"{rank}.jsonl").open("a") as file:
        for number in range(first, last):
            faulthandler.dump_traceback_later(0.9 * STALLED_S)
            found = compared(
                number,
                nn.parallel.DistributedDataParallel,
                stretto.DistributedDataParallel,
                rank,
                size,
                timeout_s=timeout_s,
            )
            file.write(json.dumps([number, found]) + "\n")
            file.flush()
    os._exit(0)


def start(
    folder: Path, size: int, first: int, last: int, options: argparse.Namespace
) -> list[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not options.as_users:
        environment["STRETTO_TUNE_SCHEDULE"] = "forced"
    command = [
        *(sys.executable, __file__, "--folder", str(folder)),
        *("--first", str(first), "--last", str(last)),
        *("--timeout-s", str(options.timeout_s)),
    ]
    with (folder / "log").open("ab") as log:
        return [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank in range(size)
        ]


def rows_of(folder: Path, size: int) -> list[list[list[Any]]]:
    paths = [folder / f"{rank}.jsonl" for rank in range(size)]
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.exists()
        else []
        for path in paths
    ]


def run(size: int, options: argparse.Namespace) -> dict[str, Any]:
    first, last = options.first, options.first + options.programs
    differ: dict[int, str] = {}
    hang: list[int] = []
    done = 0
    began_s = time.perf_counter()
    while first < last:
        with tempfile.TemporaryDirectory(prefix="programs") as name:
            folder = Path(name)
            processes = start(folder, size, first, last, options)
            seen, since_s = -1, time.perf_counter()
            while any(p.poll() is None for p in processes):
                time.sleep(0.5)
                count = min(len(rows) for rows in rows_of(folder, size))
                if count > seen:
                    seen, since_s = count, time.perf_counter()
                if time.perf_counter() - since_s > STALLED_S:
                    break
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            rows = rows_of(folder, size)
            count = min(map(len, rows))
            for rank, found in enumerate(rows):
                for number, line in found[:count]:
                    if line is not None:
                        differ.setdefault(number, f"rank {rank}: {line}")
            done += count
            first += count
            if first < last:
                print((folder / "log").read_text(errors="replace")[-3000:])
                hang.append(first)
                first += 1
    return {
        "ranks": size,
        "programs": done + len(hang),
        "equal": done - len(differ),
        "differ": {str(number): line for number, line in sorted(differ.items())},
        "hang_or_end": hang,
        "schedule": "users'" if options.as_users else "forced",
        "took_s": round(time.perf_counter() - began_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timeout-s", type=float, default=100.0, help="per collective")
    parser.add_argument("--as-users", action="store_true", help="tuning's own schedule")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.folder is not None:
        be_rank(options.folder, options.first, options.last, options.timeout_s)
    found = [run(size, options) for size in options.ranks]
    made_by = f"stretto {stretto.__version__}"
    text = json.dumps({"made_by": made_by, "runs": found}, indent=1)
    options.out.write_text(text + "\n")
    print(text)
    return any(row["differ"] or row["hang_or_end"] for row in found)


if __name__ == "__main__":
    sys.exit(main())
