"""What every planner promises."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from stretto import planners
from stretto.errors import SpecError
from stretto.planners.base import AbstractPlanner, Draft, finish
from stretto.testing.planner_suite import planner_checks

NAMES = (*planners.NAMES, "exhaustive")


def checks_of(name):
    slower = None
    if name == "horovod":

        def slower(factor):
            return planners.get("horovod", cycle_s=0.005 * factor)

    return planner_checks(
        partial(planners.get, name),
        max_tensors=4 if name == "exhaustive" else None,
        slower=slower,
    )


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {check}")
        for name in NAMES
        for check in checks_of(name)
    ],
)
def test_contract_holds(check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_planner_reports_its_own_name(name, make_instance) -> None:
    workload, cluster = make_instance(0, tensors=4)
    assert planners.get(name).plan(workload, cluster).planner == name


class Broken(AbstractPlanner):
    """Plans as a fault says."""

    name = "broken"
    fault = ""
    plans = 0

    def plan(self, workload, cluster):
        Broken.plans += 1
        number = len(workload.tensors)
        ends = [number]
        if self.fault == "another plan each time" and Broken.plans % 2 and number > 1:
            ends = [1, number]
        if self.fault == "mixes types":
            return finish(Draft.in_turn([number]), self.name, workload, cluster)
        starts = [
            i
            for i in range(1, number)
            if workload.tensors[i].dtype != workload.tensors[i - 1].dtype
        ]
        ends = sorted({*ends, *starts})
        name = "other" if self.fault == "another name" else self.name
        plan = finish(Draft.in_turn(ends), name, workload, cluster)
        if self.fault == "no prediction":
            return replace(plan, predicted=None)
        return plan


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", set()),
        ("no prediction", None),
        ("another name", {f"random instance {seed}" for seed in range(8)}),
        ("mixes types", {"types alternate", "a type without an average is refused"}),
    ],
)
def test_the_suite_finds_broken_planners(fault, found, monkeypatch) -> None:
    monkeypatch.setattr(Broken, "fault", fault)
    failed = set()
    for check in planner_checks(Broken):
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever the planner raised
            failed.add(str(check))
    if found is None:
        assert len(failed) > 8
    else:
        assert failed == found


def test_the_suite_finds_a_planner_that_changes_its_mind(monkeypatch) -> None:
    monkeypatch.setattr(Broken, "fault", "another plan each time")
    failed = [check for check in planner_checks(Broken) if not passes(check)]
    assert any(str(check).startswith("random instance") for check in failed)


class CutsByTime(AbstractPlanner):
    """Begins a bucket when as many seconds have passed."""

    name = "by-time"

    def __init__(self, seconds) -> None:
        self._seconds = seconds

    def plan(self, workload, cluster):
        last, number = None, len(workload.tensors)
        ends = [number]
        starts = planners.dtype_starts(workload)
        for i, tensor in enumerate(workload.tensors):
            part = int(tensor.ready_s / self._seconds), starts[i]
            if last not in (None, part):
                ends.append(i)
            last = part
        draft = Draft.in_turn(sorted(set(ends)))
        return finish(draft, self.name, workload, cluster)


@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 0.005, 0.03, 0.2, 1.0, 10.0])
def test_the_suite_finds_a_planner_that_cuts_at_absolute_times(seconds) -> None:
    checks = planner_checks(partial(CutsByTime, seconds))
    failed = {str(check) for check in checks if not passes(check)}
    assert failed
    assert all(name.startswith("times ") for name in failed), failed
    scaled = planner_checks(
        partial(CutsByTime, seconds), slower=lambda f: CutsByTime(seconds * f)
    )
    assert all(map(passes, scaled))


def passes(check) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


def test_joint_leaves_one_rank_to_ddp(make_instance, make_cluster) -> None:
    workload, _ = make_instance(3, tensors=6)
    cluster = make_cluster(hosts=1)
    ddp = planners.get("ddp").plan(workload, cluster)
    joint = planners.get("joint").plan(workload, cluster)
    assert joint.buckets == ddp.buckets
    assert joint.lanes == 1


def test_unknown_names_and_options_are_refused_with_what_there_is() -> None:
    with pytest.raises(SpecError, match=r"joint.*'best'"):
        planners.get("best")
    with pytest.raises(SpecError, match=r"wfbp has no option 'cap_bytes'; it has none"):
        planners.get("wfbp", cap_bytes=3)
    with pytest.raises(SpecError, match=r"ddp: cap_bytes must be > 0, got 0"):
        planners.get("ddp", cap_bytes=0)


def test_every_listed_planner_can_be_got_and_exhaustive_is_not_listed() -> None:
    assert [planners.get(name).name for name in planners.NAMES] == list(planners.NAMES)
    assert "exhaustive" not in planners.NAMES
    assert planners.options_of("ddp") == ("cap_bytes", "first_cap_bytes")
