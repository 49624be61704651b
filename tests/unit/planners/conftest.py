"""Instances for the planners' tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.testing.instances import build_cluster, build_workload, random_instance

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.schema import Cluster, Workload


@pytest.fixture(scope="session")
def make_workload() -> Callable[..., Workload]:
    return build_workload


@pytest.fixture(scope="session")
def make_cluster() -> Callable[..., Cluster]:
    return build_cluster


@pytest.fixture(scope="session")
def make_instance() -> Callable[..., tuple[Workload, Cluster]]:
    return random_instance
