"""Shows the tests of this folder one program."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _other_tests_are_other_programs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hide test files that pytest imported for other tests from searches in capture."""
    try:
        from stretto.burst.tracing import cache_search
    except ImportError:  # without torch
        return
    is_users = cache_search.is_users
    others = {
        module.__name__
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").rpartition(".")[2].startswith("test_")
        and module is not request.module
    }

    def is_of_this_program(space: Any) -> bool:
        return getattr(space, "__name__", None) not in others and is_users(space)

    monkeypatch.setattr(cache_search, "is_users", is_of_this_program)
