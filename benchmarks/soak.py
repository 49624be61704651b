"""Run 1,000 steps with a new plan every 10, beside DDP's on the same data, 2 ranks.

Losses must equal DDP's bit for bit, and memory, threads and sockets must not grow once
all plans have been used. ``--short`` takes 100 steps with a plan every 5.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

from _ranks import run
from _record import store
from stretto.testing.soak import soak


def one_rank(rank: int, size: int, folder: str, steps: int, every: int) -> None:
    warnings.simplefilter("ignore")
    found = soak(rank, size, steps=steps, every=every)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    steps, every = (100, 5) if "--short" in sys.argv else (1000, 10)
    with tempfile.TemporaryDirectory() as folder:
        run(one_rank, 2, folder, steps, every)
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)
        ]
    store(
        "soak",
        {
            "what": "losses against DDP's, and what each process holds at five moments",
            "reach": "no difference; sockets and threads equal from the second on",
            "ranks": ranks,
        },
    )


if __name__ == "__main__":
    main()
