"""The search for caches visits what packages hold once, and still finds new places."""

from __future__ import annotations

import importlib
import sys
import weakref

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.cache_search import Holders
from stretto.burst.tracing.caches import entries_in
from stretto.burst.tracing.package_holders import PackageHolders

NUM_CLASSES = 200

SOURCE = """
class Tables:
    held = {}
    inner = {"deep": {}}
    rate = 2.0

    def made(self, size=[]):
        return size

def make(step):
    count = 0
    def called():
        return count + step
    def set_count(value):
        nonlocal count
        count = value
    return called, set_count

called, set_count = make(1)
Tables.called, Tables.set_count = staticmethod(called), staticmethod(set_count)
"""

USED = []
"""What this program imported of the package."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    many = "\n".join(
        f"class Kind{i}:\n    options = [{i}]\n    def call(self): pass"
        for i in range(NUM_CLASSES)
    )
    (folder / "package_with_tables.py").write_text(SOURCE + many)
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("package_with_tables")
    USED[:] = [
        module.Tables,
        *(getattr(module, f"Kind{i}") for i in range(NUM_CLASSES)),
    ]
    yield module
    USED.clear()
    del sys.modules["package_with_tables"]


def searched(packages):
    return Holders(nn.Linear(2, 2), lambda tensor: tensor, packages)


def test_a_later_search_visits_no_class_of_a_package_again(package):
    packages = PackageHolders()
    searched(packages)
    num_visited = packages.num_visited
    searched(packages)
    assert packages.num_visited == num_visited >= NUM_CLASSES


def test_classes_of_a_package_add_no_visits_to_a_later_search(package):
    packages = PackageHolders()
    searched(packages)
    with_many = searched(packages).num_visited
    del USED[1:]
    assert with_many == searched(packages).num_visited


def test_only_what_changed_in_a_package_is_searched_again(package):
    packages = PackageHolders()
    searched(packages)
    before = searched(packages).num_visited
    package.Tables.later = {}
    assert searched(packages).num_visited - before < NUM_CLASSES


def set_attribute(package, value):
    package.Tables.table = value


def set_attribute_of_function(package, value):
    package.Tables.made.table = value


def fill_dictionary(package, value):
    package.Tables.held["table"] = value


def fill_inner_dictionary(package, value):
    package.Tables.inner["deep"]["table"] = value


def fill_default(package, value):
    package.Tables().made().append(value)


def set_variable_of_closure(package, value):
    package.Tables.set_count(value)


def replace_value(package, value):
    package.Tables.rate = value


WAYS = [
    set_attribute,
    set_attribute_of_function,
    fill_dictionary,
    fill_inner_dictionary,
    fill_default,
    set_variable_of_closure,
    replace_value,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_change_in_a_package_is_found(package, way, num_before):
    packages, value = PackageHolders(), torch.ones(2)
    for _ in range(num_before):
        searched(packages)
    holders = searched(packages)
    way(package, value)
    changed = [entry for h in holders.differing() for entry in _new_entries(h)]
    assert any(entry is value for entry in changed)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_change_in_the_same_place_is_found(package, way):
    packages, value = PackageHolders(), torch.ones(2)
    searched(packages)
    way(package, torch.zeros(2))
    holders = searched(packages)
    way(package, value)
    changed = [entry for h in holders.differing() for entry in _new_entries(h)]
    assert any(entry is value for entry in changed)


def _new_entries(holder):
    known = list(holder.before.values())
    now = entries_in(holder.of).values()
    return [value for value in now if not any(value is one for one in known)]


def test_a_container_made_after_the_first_search_is_found(package):
    packages, value = PackageHolders(), torch.ones(2)
    searched(packages)
    package.Tables.later = {"deep": []}
    holders = searched(packages)
    package.Tables.later["deep"].append(value)
    later = package.Tables.later["deep"]
    assert any(h.of is later for h in holders.differing())


def test_a_container_that_replaces_another_is_found(package):
    packages, value = PackageHolders(), torch.ones(2)
    searched(packages)
    package.Tables.held = {}
    holders = searched(packages)
    package.Tables.held["table"] = value
    assert any(h.of is package.Tables.held for h in holders.differing())


def test_a_tensor_that_a_package_drops_is_not_kept(package):
    packages = PackageHolders()
    package.Tables.held["table"] = torch.ones(2)
    alive = weakref.ref(package.Tables.held["table"])
    searched(packages)
    package.Tables.held.clear()
    assert alive() is None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        tables = USED[0]
        if "table" not in tables.held:
            tables.held["table"] = torch.arange(4.0).cos()
        return self.last(self.first(x) * tables.held["table"])


def test_a_cache_in_a_package_is_captured_and_left_empty_each_time(package):
    for _ in range(2):
        capture(Model(), (torch.randn(6, 4),))
        assert package.Tables.held == {}
