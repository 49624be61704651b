"""The reference of a cluster's files and output names all that there is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto.cli import main
from stretto.cli.cluster import _MODULES
from stretto.cluster import events
from stretto.cluster.folders import Folders
from stretto.schema.job import Job
from support.clusters import await_that

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parents[3] / "docs/how-to/cluster-reference.md").read_text()

TRACE = """job_name,job_type,gpu_request,worker_num,submit_time,duration
a,HP,1,1,0,60
b,Spot,1,1,5,30
"""

BY_NAME = ("jobs", "data")
"""Fields whose objects have keys that are not fields of the output: states of jobs, and
an event's data."""


def section(command: str) -> str:
    """Return what the page says about a command's output."""
    parts = re.split(r"^###? ", PAGE, flags=re.MULTILINE)
    (found,) = [part for part in parts if f"`{command}`" in part.partition("\n")[0]]
    return found


def keys_of(kind: Any, place: str = "") -> Iterator[str]:
    """Yield the keys of a dataclass's file, with those inside of them."""
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        yield f"{place}{each.name}"
        for inner in (hints[each.name], *typing.get_args(hints[each.name])):
            if dataclasses.is_dataclass(inner):
                yield from keys_of(inner, f"{place}{each.name}.")


def fields_of(value: Any) -> Iterator[str]:
    """Yield the fields of an output, with those inside of them."""
    if isinstance(value, list):
        for each in value:
            yield from fields_of(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            if key not in BY_NAME or isinstance(each, list):
                yield from fields_of(each)


def is_named(name: str, text: str) -> bool:
    """Return whether a text has a name as code, alone or at the end of a path."""
    return re.search(rf"`([\w.]*\[\]\.)?{re.escape(name)}`", text) is not None


@pytest.mark.parametrize("key", list(keys_of(Job)))
def test_every_key_of_a_job_file_is_in_the_reference(key: str) -> None:
    assert f"`{key}`" in PAGE.partition("## JSON output")[0]


@pytest.mark.parametrize("kind", sorted(events.KINDS))
def test_every_kind_of_event_is_in_the_reference(kind: str) -> None:
    assert f"`{kind}`" in PAGE.partition("\n## Kinds of events")[2]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each command of a cluster prints with --json, by command."""
    folder = tmp_path_factory.mktemp("reference")
    root, job = folder / "c", folder / "job.json"
    body = {
        "kind": "job",
        "schema_version": 1,
        "made_by": "test",
        "name": "tiny",
        "role": "foreground",
        "command": ["/bin/sh", "-c", "echo hello"],
        "launch": "direct",
        "directory": ".",
        "gpus": {"minimum": 1, "maximum": 1},
    }
    job.write_text(json.dumps(body))
    trace = folder / "trace.csv"
    trace.write_text(TRACE)
    found: dict[str, list[Any]] = {}
    capture = pytest.MonkeyPatch()
    capture.setenv("XDG_CACHE_HOME", str(folder))

    def run(command: str, *words: str) -> list[Any]:
        printed = io.StringIO()
        where = [] if command == "simulate" else ["--folder", str(root)]
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            main(["cluster", command, *words, *where, "--json"])
        assert not ended.value.code, printed.getvalue()
        text, decoder, values = printed.getvalue().strip(), json.JSONDecoder(), []
        while text:
            value, end = decoder.raw_decode(text)
            values.append(value)
            text = text[end:].strip()
        return values

    def is_done() -> bool:
        return bool(run("list", "--all")[0]["jobs"][0]["state"] == "done")

    options = ("--local", "1", "--kind", "cpu", "--report", "0.1")
    found["start"] = run("start", *options)
    try:
        found["submit"] = run("submit", str(job))
        await_that(is_done, lambda: "the job is not done")
        found["list"] = run("list", "--all")
        found["show"] = run("show", "tiny")
        found["logs"] = run("logs", "tiny")
        found["stop"] = run("stop", "tiny")
        found["drain"] = run("drain", "host0")
        found["events"] = run("events")
        found["status"] = run("status")
    finally:
        found["down"] = run("down")
        assert Folders(root).down.exists()
    found["simulate"] = run("simulate", str(trace), "--gpus", "2", "--policy", "fifo")
    capture.undo()
    return found


@pytest.mark.parametrize("command", list(_MODULES))
def test_every_field_of_a_commands_json_is_in_the_reference(
    outputs: dict[str, list[Any]], command: str
) -> None:
    text = section(command) + (section("list") if command == "show" else "")
    fields = set(fields_of(outputs[command]))
    assert fields
    assert not {field for field in fields if not is_named(field, text)}


def test_every_field_of_an_events_data_is_in_the_reference(
    outputs: dict[str, list[Any]],
) -> None:
    lines = PAGE.partition("\n## Kinds of events")[2].splitlines()
    for row in outputs["events"]:
        (line,) = [x for x in lines if f"`{row['kind']}`" in x.partition(" | ")[0]]
        fields = {name for name in row["data"] if not is_named(name, line)}
        assert not fields, row
