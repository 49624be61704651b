"""For all tests: nothing of this machine's earlier runs is remembered."""

from __future__ import annotations

import os

from hypothesis import settings

# A busy machine is not a defect: no example has a time limit of its own.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

os.environ["STRETTO_MEMORY"] = "off"
