"""For all tests: nothing of this machine's earlier runs is remembered."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

# A busy machine is not a defect: no example has a time limit of its own.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

os.environ["STRETTO_MEMORY"] = "off"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take minutes: nothing runs beside the last one."""
    items.sort(key=lambda item: item.path.parent.name != "conformance")
