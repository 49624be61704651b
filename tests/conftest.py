"""For all tests: nothing of this machine's earlier runs is remembered.

Tests marked ``repeat`` run with ``STRETTO_TEST_ALL=1`` only.
"""

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


ALL = "STRETTO_TEST_ALL" in os.environ


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Begin with the tests that take minutes: nothing runs beside the last one."""
    repeated = [item for item in items if item.get_closest_marker("repeat")]
    if repeated and not ALL:
        config.hook.pytest_deselected(items=repeated)
        items[:] = [item for item in items if item not in repeated]
    items.sort(key=lambda item: item.path.parent.name != "conformance")
