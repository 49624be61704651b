"""Recompute the papers' figures beside the published ones, with reasons for misses.

    python benchmarks/reproduced.py

Writes ``benchmarks/results/reproduced.json``.
"""

from __future__ import annotations

import time

from _record import store
from stretto.papers import PAPERS, reproduce


def main() -> None:
    papers = {}
    for paper in PAPERS:
        begin_s = time.perf_counter()
        done = reproduce(paper).as_dict()
        papers[paper] = {
            "seconds": time.perf_counter() - begin_s,
            "reached": done["reached"],
            "missed": done["missed"],
            "figures": [
                {
                    key: row[key]
                    for key in ("table", "name", "ours", "reference", "source")
                }
                | {key: row[key] for key in ("error", "tolerance", "reached")}
                | ({"note": row["note"]} if row["reached"] is False else {})
                for row in done["figures"]
                if row["reference"] is not None
            ],
            "left": done["left"],
        }
    store("reproduced", {"papers": papers})


if __name__ == "__main__":
    main()
