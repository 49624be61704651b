"""Every command of the table is there and says what it and its options are for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from stretto.cli._main import COMMANDS, group


def all_commands(command, path):
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            yield from all_commands(below, f"{path} {name}")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_down_to_its_options(name):
    command = importlib.import_module(f"stretto.cli.{name}").command
    assert isinstance(command, click.Command)
    for path, part in all_commands(command, name):
        assert (part.help or "").strip(), path
        for parameter in part.params:
            if isinstance(parameter, click.Option):
                assert (parameter.help or "").strip(), (path, parameter.name)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_is_printed(name):
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: group {name}")


def test_the_list_of_commands_names_all():
    output = CliRunner().invoke(group, ["--help"]).output
    for name, text in COMMANDS.items():
        assert f"  {name} " in output
        assert text.split(",")[0][:40] in " ".join(output.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_list_of_commands_shows_whole_sentences(name):
    output = CliRunner().invoke(group, [name, "--help"]).output
    listed = output.partition("\nCommands:\n")[2]
    cut = [line for line in listed.splitlines() if line.endswith("...")]
    assert not cut, "shorten the first sentence of the command's docstring"


def test_the_short_option_for_help_works_below_the_group_too():
    # In a process of its own: click keeps the help option that a command had when it
    # was first called, which in other tests may have been without the group.
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "report", "-h"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: stretto report")


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(group, ["fly"])
    assert result.exit_code == 2
    assert "fly" in result.output
