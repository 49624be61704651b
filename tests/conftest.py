"""For all tests: nothing of this machine's earlier runs is remembered."""

from __future__ import annotations

import os

os.environ["STRETTO_MEMORY"] = "off"
