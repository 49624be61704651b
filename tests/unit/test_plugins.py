"""Planners, techniques and backends as objects, and from installed packages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import stretto
from stretto import planners
from stretto.cli._main import group
from stretto.errors import PlanMismatch, SpecError
from stretto.planners import AbstractPlanner, Draft, finish
from stretto.runtime import backends
from stretto.testing.instances import capped_cluster, small_workload
from stretto.tune import TuneOptions
from stretto.tune.techniques import (
    AbstractTechnique,
    PredictedTechnique,
    technique_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULE = '''
"""A planner and a technique of another package."""

from typing import ClassVar

from stretto.planners import AbstractPlanner, Draft, finish
from stretto.tune.techniques import AbstractTechnique, Proposal


class Halves(AbstractPlanner):
    name: ClassVar[str] = "halves"

    def __init__(self, *, lanes=2):
        self._lanes = lanes

    def plan(self, workload, cluster):
        number = len(workload.tensors)
        draft = Draft.in_turn([number // 2, number], lanes=self._lanes)
        return finish(draft, self.name, workload, cluster)


class First(AbstractTechnique):
    name: ClassVar[str] = "first"

    def __init__(self, space):
        self._space = space

    def ask(self):
        return Proposal(point=self._space.points[0])

    def tell(self, proposal, step_s, *, mine):
        pass


class Unfinished(AbstractPlanner):
    name: ClassVar[str] = "unfinished"


nothing = 3
'''


BACKENDS = '''
"""Backends of another package."""

from stretto.runtime.backends.base import AbstractBackend
from stretto.runtime.backends.gloo import GlooBackend


class Wires(GlooBackend):
    name = "wires"


class Unwired(AbstractBackend):
    name = "unwired"
'''


class Whole(AbstractPlanner):
    """Everything in one bucket, in a number of slices."""

    name = "whole"

    def __init__(self, slices: int) -> None:
        self._slices = slices

    def plan(self, workload, cluster):
        draft = Draft.in_turn([len(workload.tensors)], lanes=2, slices=self._slices)
        return finish(draft, self.name, workload, cluster)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what installs packages with entry points, for one test."""

    def add(*entries: str, package: str = "others") -> None:
        (tmp_path / "stretto_others.py").write_text(MODULE)
        (tmp_path / "stretto_wires.py").write_text(BACKENDS)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text("\n".join(entries) + "\n")
        monkeypatch.syspath_prepend(tmp_path)

    return add


def test_a_planner_is_accepted_as_an_object() -> None:
    workload, cluster = small_workload(), capped_cluster()
    plan = stretto.plan(workload, cluster, Whole(2))
    assert (plan.planner, len(plan.buckets), plan.buckets[0].slices) == ("whole", 1, 2)
    assert plan.predicted is not None
    narrow = stretto.plan(workload, cluster, Whole(2), wire_dtype="bfloat16")
    assert narrow.buckets[0].wire_dtype == "bfloat16"
    both = stretto.compare(workload, cluster, ["ddp", Whole(1)])
    assert list(both) == ["ddp", "whole"]
    assert both["whole"].buckets[0].slices == 1


def test_options_of_an_object_belong_to_its_constructor() -> None:
    with pytest.raises(SpecError, match=r"whole is an object.*slices.*constructor"):
        stretto.plan(small_workload(), capped_cluster(), Whole(2), slices=3)


def test_a_planner_is_found_by_its_entry_point(install, tmp_path) -> None:
    install("[stretto.planners]", "halves = stretto_others:Halves")
    workload, cluster = small_workload(), capped_cluster()
    plan = stretto.plan(workload, cluster, "halves", lanes=3)
    assert (plan.planner, plan.lanes, len(plan.buckets)) == ("halves", 3, 2)
    assert planners.options_of("halves") == ("lanes",)
    with pytest.raises(SpecError, match=r"exhaustive, halves, got 'best'"):
        planners.get("best")
    workload.save(tmp_path / "workload.json")
    cluster.save(tmp_path / "cluster.json")
    files = [str(tmp_path / "workload.json"), str(tmp_path / "cluster.json")]
    result = CliRunner().invoke(
        group, ["plan", *files, "--planner", "halves", "--lanes", "3", "--json"]
    )
    assert json.loads(result.output)["lanes"] == 3, result.output
    result = CliRunner().invoke(
        group, ["compare", *files, "--planner", "halves", "--json"]
    )
    names = [row["planner"] for row in json.loads(result.output)]
    assert names == [*planners.NAMES, "halves"]


def test_a_technique_is_found_by_its_entry_point(install) -> None:
    install("[stretto.techniques]", "first = stretto_others:First")
    options = TuneOptions(techniques=("first", "grid"))
    assert technique_of("first").name == "first"
    with pytest.raises(SpecError, match="hyperband, first, or subclasses"):
        TuneOptions(techniques=("last",))
    assert options.techniques == ("first", "grid")


def test_a_technique_is_accepted_as_a_class() -> None:
    class Mine(AbstractTechnique):
        """A technique of the program."""

        name = "mine"

        def ask(self):
            return None

        def tell(self, proposal, step_s, *, mine):
            pass

    assert technique_of(Mine) is Mine
    assert TuneOptions(techniques=(Mine, "grid")).techniques == (Mine, "grid")
    with pytest.raises(SpecError, match="'mine' twice"):
        TuneOptions(techniques=(Mine, Mine))
    with pytest.raises(SpecError, match="'predicted' needs model=True"):
        TuneOptions(techniques=(PredictedTechnique,), model=False)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("x = stretto_others:Halves", r"Halves\.name must be 'x', got 'halves'"),
        ("x = stretto_others:First", "must be a subclass of AbstractPlanner, got"),
        ("x = stretto_others:nothing", "must be a subclass of AbstractPlanner, got 3"),
        ("unfinished = stretto_others:Unfinished", "Unfinished must implement plan"),
        ("x = stretto_others:Missing", "of others cannot be loaded: AttributeError"),
        ("x = stretto_missing:Missing", "loaded: ModuleNotFoundError.*stretto_missing"),
    ],
)
def test_broken_entry_points_are_one_error(install, entry, text) -> None:
    install("[stretto.planners]", entry)
    with pytest.raises(SpecError, match=text):
        planners.get(entry.split()[0])


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("x = stretto_others:Halves", "must be a subclass of AbstractBackend, got"),
        ("x = stretto_wires:Wires", r"Wires\.name must be 'x', got 'wires'"),
        ("x = stretto_others:Missing", "of others cannot be loaded: AttributeError"),
        ("unwired = stretto_wires:Unwired", "Unwired must implement .*, lanes, "),
    ],
)
def test_broken_entry_points_of_backends_are_the_same_error(
    install: Callable[..., None], entry: str, text: str
) -> None:
    install("[stretto.backends]", entry)
    name = entry.split()[0]
    assert backends.supported(name)
    assert backends.names()[-1] == name
    with pytest.raises(SpecError, match=text):
        backends.get(name)


def test_an_installed_backend_is_found_by_its_name(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_loaded", {})
    assert not backends.supported("wires")
    install(
        "[stretto.backends]", "wires = stretto_wires:Wires", "gloo = nowhere:Nothing"
    )
    assert type(backends.get("wires")).__name__ == "Wires"
    assert backends.get("wires") is backends.get("wires")
    assert type(backends.get("gloo")).__name__ == "GlooBackend"
    assert backends.names() == ("gloo", "nccl", "local", "hierarchical", "wires")
    known = "use gloo or nccl or local or hierarchical or wires, or"
    with pytest.raises(PlanMismatch, match=known):
        backends.get("pigeons")


def test_two_packages_may_not_share_a_name(install) -> None:
    for package in ("others", "more"):
        install("[stretto.planners]", "x = stretto_others:Halves", package=package)
    with pytest.raises(SpecError, match=r"several packages \(more, others\)"):
        planners.get("x")


def test_an_installed_planner_does_not_replace_strettos(install) -> None:
    install("[stretto.planners]", "ddp = stretto_others:Halves")
    assert type(planners.get("ddp")).__name__ == "DdpPlanner"
