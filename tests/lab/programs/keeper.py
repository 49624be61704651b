"""A host's keeper, as of `stretto run --elastic 1:8`, with ranks that train nothing.

The lab has started it, so it finds the others as under any launcher.
"""

import dataclasses
import os
import sys
from pathlib import Path

from stretto.cli._elastic import elastic_job, parse_arguments
from stretto.members.keeper import RankKeeper

program = Path(__file__).with_name("membership.py")
given = parse_arguments(("--nproc-per-node", "1", str(program)))
job = dataclasses.replace(
    elastic_job("1:8", given, os.environ),
    command=(sys.executable, str(program), *sys.argv[1:]),
)
assert "torch" not in sys.modules
sys.exit(RankKeeper(job).run())
