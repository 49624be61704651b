"""Outputs and scripts are checked before the work, and by the rank that writes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stretto.cli._main import COMMANDS, group
from stretto.cli._outputs import OutputCommand, why_not_writable, writable
from stretto.errors import SpecError


def commands_of(name: str, command: click.Command) -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return [(name, command)]
    context = click.Context(command)
    return [
        row
        for part in command.list_commands(context)
        for row in commands_of(f"{name} {part}", command.get_command(context, part))
    ]


def outputs_of(name: str, command: click.Command) -> list[tuple[str, click.Option]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        return [
            row
            for part in command.list_commands(context)
            for row in outputs_of(f"{name} {part}", command.get_command(context, part))
        ]
    return [
        (name, option)
        for option in command.params
        if isinstance(option, click.Option) and option.name == "output"
    ]


def test_every_command_checks_its_output_first() -> None:
    context = click.Context(group)
    found = [
        row
        for name in COMMANDS
        for row in outputs_of(name, group.get_command(context, name))
    ]
    assert len(found) >= 10
    unchecked = {name for name, option in found if option.callback is not writable}
    assert unchecked == {"convert"}  # it writes nothing before it has read the script


def test_every_command_keeps_its_inputs() -> None:
    context = click.Context(group)
    found = [
        row
        for name in COMMANDS
        for row in commands_of(name, group.get_command(context, name))
    ]
    writing = {n for n, c in found if any(p.callback is writable for p in c.params)}
    assert len(writing) >= 10
    kept = {n for n, c in found if isinstance(c, OutputCommand)}
    assert writing | {"convert", "run"} <= kept


def test_a_folder_that_is_missing_is_reported_before_the_measurement(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('ran')\n")
    place = tmp_path / "none" / "w.json"
    done = CliRunner().invoke(group, ["profile", "-o", str(place), str(script)])
    assert isinstance(done.exception, SpecError)
    assert f"the folder {place.parent} does not exist" in str(done.exception)


def test_ranks_that_write_nothing_need_no_folder(monkeypatch) -> None:
    place = Path("no/such/folder/w.json")
    assert why_not_writable(place) is not None
    monkeypatch.setenv("RANK", "1")
    assert why_not_writable(place) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("def f(:\n", "    def f(:"),
        ("def f():\n    return 1 / 0\n\nf()\n", "    return 1 / 0"),
    ],
)
def test_an_error_of_a_script_is_shown_without_our_frames(
    text, shown, tmp_path, capfd
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    arguments = ["profile", "-o", str(tmp_path / "w.json"), str(script)]
    with pytest.raises(SystemExit) as ended:
        group.main(arguments)
    assert ended.value.code == 1
    error = capfd.readouterr().err
    assert shown in error
    assert "main_module" not in error
    assert "click" not in error


def test_an_error_of_a_factory_is_shown_without_our_frames(tmp_path, capfd) -> None:
    file = tmp_path / "factory.py"
    file.write_text("def make():\n    return 1 / 0\n")
    arguments = ["burst", "profile", f"{file}:make", "-o", str(tmp_path / "p.json")]
    with pytest.raises(SystemExit) as ended:
        group.main([*arguments, "--gpus", "2", "--batch", "4"])
    assert ended.value.code == 1
    error = capfd.readouterr().err
    assert "    return 1 / 0" in error
    assert "made_by" not in error


@pytest.mark.parametrize("command", [["run"], ["profile", "-o", "w.json"]])
def test_a_folder_is_no_script(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    done = CliRunner().invoke(group, [*command, "folder"])
    assert str(done.exception) == "folder: is a folder, not a script"
