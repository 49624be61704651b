"""Every command of the table is there and says what it and its options are for."""

from __future__ import annotations

import importlib

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
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_printed(name, flag):
    result = CliRunner().invoke(group, [name, flag])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: group {name}")


def test_the_list_of_commands_names_all():
    output = CliRunner().invoke(group, ["--help"]).output
    for name, text in COMMANDS.items():
        assert f"  {name} " in output
        assert text.split(",")[0][:40] in " ".join(output.split())


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(group, ["fly"])
    assert result.exit_code == 2
    assert "fly" in result.output
