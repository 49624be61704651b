"""PyTorch's own tests of DDP, with DDP and with ours in its place.

Run by ``scripts/conformance``. Prints a table; status 1 when a test does otherwise
than ``known.json`` says, status 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

SIZE = 2
HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these tests")
    parser.add_argument("--form", action="append", help="ddp, ours or planned")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th, from the K-th")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="per test")
    parser.add_argument("--verbose", action="store_true", help="errors in full")
    parser.add_argument("--json", type=Path, help="also write what was found")
    options = parser.parse_args()
    first, _, step = options.part.partition("/")
    with tempfile.TemporaryDirectory(prefix="conformance") as folder:
        os.environ.update(
            BACKEND="gloo",
            WORLD_SIZE=str(SIZE),
            TEMP_DIR=folder,
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        )
        sys.path.insert(0, str(HERE))
        import suite
        import verdict

        known = verdict.load(HERE / "known.json")
        began_s = time.perf_counter()
        found, every = suite.run(
            folder=Path(folder),
            size=SIZE,
            forms=options.form,
            names=options.names,
            one_bucket=known.one_bucket,
            timeout_s=options.timeout_s,
            part=(int(first), int(step)),
        )
        took_s = time.perf_counter() - began_s
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, sort_keys=True))
    print(verdict.table(found, known, verbose=options.verbose))
    wrong = verdict.surprises(found, known, [] if options.names else every)
    print(f"\n{len(found)} tests in {took_s:.0f} s")
    for line in wrong:
        print(f"NOT AS KNOWN: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
