"""``stretto tune``: what earlier runs settled on, seen, kept and forgotten."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from stretto import variable_names
from stretto.cli._main import group, main
from stretto.errors import SpecError
from stretto.schema import (
    Link,
    Plan,
    TensorSpec,
    Workload,
)
from stretto.tune.plan_cache import VERSION, CachedPlan, PlanCache, TunedJob
from support.instances import one_link
from support.plans import plan_in_turn

if TYPE_CHECKING:
    from pathlib import Path

LONG = "TransformerLanguageModelOfSomeLength"


def settled(name: str, *, ddp_step_s: float | None) -> CachedPlan:
    workload = Workload(
        name=name,
        framework="pytorch",
        device="cpu",
        batch_per_rank=4,
        forward_s=0.1,
        backward_s=0.2,
        tensors=tuple(
            TensorSpec(name=n, bytes=2**20, dtype="float32", ready_s=r, needed_s=0.0)
            for n, r in (("b", 0.1), ("a", 0.2))
        ),
    )
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    plan = plan_in_turn(
        (("b",), ("a",)),
        ranks=8,
        lanes=2,
        slices=2,
        workload_digest=workload.digest,
    )
    return CachedPlan(
        job=TunedJob(
            name=name,
            model=f"sha256:{name}",
            hosts=4,
            ranks_per_host=2,
            environment="torch 2.13, cpu, gloo",
        ),
        plan=replace(plan, planner="tuned"),
        workload=workload,
        cluster=one_link(link, hosts=4, ranks_per_host=2),
        step_s=0.25,
        ddp_step_s=ddp_step_s,
    )


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "plans.sqlite"
    kept = PlanCache(path, strict=True)
    kept.store(settled("small", ddp_step_s=None))
    kept.store(settled(LONG, ddp_step_s=0.5))
    return path


def run(*args: object) -> Result:
    """Its result; our errors are raised on, as `main` sees them."""
    result = CliRunner().invoke(group, ["tune", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(memory: Path) -> list[dict[str, Any]]:
    result = run("list", "--plan-cache", memory, "--json")
    assert result.exit_code == 0
    found: list[dict[str, Any]] = json.loads(result.stdout)["plans"]
    return found


def test_the_list_has_the_newest_first_and_its_columns_apart(memory: Path) -> None:
    result = run("list", "--plan-cache", memory)
    assert result.exit_code == 0
    head, newest, older = result.stdout.splitlines()
    assert head.split()[:5] == ["number", "model", "ranks", "step", "DDP"]
    # A name as long as any still ends before the ranks.
    assert newest.split()[:6] == ["2", LONG, "4", "x", "2", "250"]
    assert "500 ms" in newest
    assert older.split()[:2] == ["1", "small"]
    assert " - " in older
    assert newest.index("4 x 2") == older.index("4 x 2") == head.index("ranks")


def test_the_list_as_json_is_one_object(memory: Path) -> None:
    newest, older = rows(memory)
    assert newest == {
        "number": 2,
        "name": LONG,
        "at": newest["at"],
        "hosts": 4,
        "ranks_per_host": 2,
        "environment": "torch 2.13, cpu, gloo",
        "step_s": 0.25,
        "ddp_step_s": 0.5,
        "unfinished_steps": None,
        "planner": "tuned",
        "lanes": 2,
        "buckets": 2,
    }
    assert older["ddp_step_s"] is None


def test_a_plan_is_shown_and_kept_as_a_file(memory: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run("show", 2, "--plan-cache", memory, "-o", path)
    assert result.exit_code == 0
    assert f"{LONG} on 4 x 2 ranks" in result.stdout
    assert "in torch 2.13, cpu, gloo" in result.stdout
    assert "measured step 250 ms, DDP's 500 ms" in result.stdout
    buckets = [line for line in result.stdout.splitlines() if "1 MiB" in line]
    assert len(buckets) == 2
    assert Plan.load(path) == settled(LONG, ddp_step_s=None).plan
    assert "DDP" not in run("show", 1, "--plan-cache", memory).stdout
    assert (
        json.loads(run("show", 1, "--plan-cache", memory, "--json").stdout)["lanes"]
        == 2
    )


def test_one_plan_is_forgotten_or_all(memory: Path) -> None:
    assert run("forget", 1, "--plan-cache", memory).stdout == "forgot 1 plan\n"
    assert [row["number"] for row in rows(memory)] == [2]
    with pytest.raises(SpecError, match="there is no plan 1: see `stretto tune list`"):
        run("forget", 1, "--plan-cache", memory)
    assert run("forget", "--all", "--plan-cache", memory).stdout == "forgot 1 plan\n"
    assert run("forget", "--all", "--plan-cache", memory).stdout == "forgot 0 plans\n"
    assert run("list", "--plan-cache", memory).stdout == "no plans are kept yet\n"
    assert rows(memory) == []


@pytest.mark.parametrize("args", [["forget"], ["forget", "1", "--all"]])
def test_what_to_forget_must_be_said_once(memory: Path, args: list[str]) -> None:
    result = run(*args, "--plan-cache", memory)
    assert result.exit_code == 2
    assert "give the NUMBER of a plan, or --all" in result.stderr
    assert len(rows(memory)) == 2


@pytest.mark.parametrize("number", ["0", "x", str(2**63)])
def test_what_is_no_number_of_a_plan_is_wrong_input(memory: Path, number: str) -> None:
    for command in ("show", "forget"):
        result = run(command, number, "--plan-cache", memory)
        assert result.exit_code == 2
        assert "NUMBER" in result.stderr
        assert number in result.stderr
    with pytest.raises(SpecError, match=f"there is no plan {2**63 - 1}"):
        run("show", 2**63 - 1, "--plan-cache", memory)


def test_a_file_of_another_layout_is_refused_and_left_alone(memory: Path) -> None:
    file = sqlite3.connect(memory)
    file.execute("PRAGMA user_version = 9")
    file.close()
    before = memory.read_bytes()
    for args in (["list"], ["show", "1"], ["forget", "--all"]):
        with pytest.raises(SpecError) as caught:
            run(*args, "--plan-cache", memory)
        words = str(caught.value)
        assert str(memory) in words
        assert f"its layout is version 9, this stretto reads {VERSION}" in words
        assert "Remove the file" in words
    assert memory.read_bytes() == before


def test_what_is_no_memory_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes, which are much longer than SQLite's header is " * 9)
    before = path.read_bytes()
    for args in (["list"], ["show", "1"], ["forget", "--all"]):
        with pytest.raises(SpecError, match="file is not a database"):
            run(*args, "--plan-cache", path)
    with pytest.raises(SpecError, match="unable to open database file"):
        run("list", "--plan-cache", tmp_path)
    assert path.read_bytes() == before


def test_an_entry_that_can_not_be_read_can_be_forgotten(memory: Path) -> None:
    with sqlite3.connect(memory) as file:
        file.execute('UPDATE settled SET plan = \'{"kind": "plan"\' WHERE id = 1')
    file.close()
    result = run("list", "--plan-cache", memory)
    assert result.exit_code == 0
    _, newest, broken = result.stdout.splitlines()
    assert "500 ms" in newest
    assert broken.split()[:2] == ["1", "small"]
    assert broken.endswith("unreadable")
    assert result.stderr.startswith("entry 1 cannot be read: ")
    assert result.stderr.endswith("`stretto tune forget 1` removes it\n")
    found = json.loads(run("list", "--plan-cache", memory, "--json").stdout)
    assert [row["number"] for row in found["plans"]] == [2]
    (row,) = found["unreadable"]
    assert (row["number"], row["name"]) == (1, "small")
    assert row["why"] in result.stderr
    with pytest.raises(SpecError, match=r"entry 1 cannot be read.*tune forget 1"):
        run("show", 1, "--plan-cache", memory)
    assert run("forget", 1, "--plan-cache", memory).stdout == "forgot 1 plan\n"
    assert [row["number"] for row in rows(memory)] == [2]


def test_an_unfinished_plan_is_marked_as_such(memory: Path) -> None:
    kept = PlanCache(memory, strict=True)
    kept.store(replace(settled("early", ddp_step_s=None), unfinished_steps=40))
    lines = run("list", "--plan-cache", memory).stdout.splitlines()
    assert lines[0].endswith("state")
    assert lines[1].endswith("unfinished after 40 steps")
    assert lines[2].endswith("settled")
    assert [row["unfinished_steps"] for row in rows(memory)] == [40, None, None]
    assert (
        "unfinished after 40 steps, " in run("show", 3, "--plan-cache", memory).stdout
    )
    assert "settled, " in run("show", 2, "--plan-cache", memory).stdout


def test_looking_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "no" / "plans.sqlite"
    for args in (["list"], ["show", "1"], ["forget", "--all"]):
        with pytest.raises(SpecError, match="no such file"):
            run(*args, "--plan-cache", missing)
    # Where no run has settled yet, there is nothing wrong.
    monkeypatch.delenv(variable_names.PLAN_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run("list").stdout == "no plans are kept yet\n"
    found = json.loads(run("list", "--json").stdout)
    assert found == {"plans": [], "unreadable": []}
    assert run("forget", "--all").stdout == "forgot 0 plans\n"
    with pytest.raises(SpecError, match="there is no plan 1"):
        run("show", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_variable_says_where(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable_names.PLAN_CACHE, str(memory))
    assert "small" in run("list").stdout
    monkeypatch.setenv(variable_names.PLAN_CACHE, "off")
    with pytest.raises(
        SpecError, match=f"{variable_names.PLAN_CACHE} is off or there is no home: give"
    ):
        run("list")
    assert "small" in run("list", "--plan-cache", memory).stdout


def test_an_error_is_one_line_and_exit_code_2(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (
        ["show", "7", "--plan-cache", str(memory)],
        [
            "show",
            "1",
            "--plan-cache",
            str(memory),
            "-o",
            str(tmp_path / "no" / "p.json"),
        ],
        ["list", "--plan-cache", str(tmp_path / "no.sqlite")],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["tune", *args])
        assert stopped.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("stretto: error: ")
        assert err.count("\n") == 1
