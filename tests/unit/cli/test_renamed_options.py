"""Options under their former names, which are accepted and not shown."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from stretto.cli import run, tune
from stretto.cli._values import RenamedOption
from stretto.cli.burst import plan_command

RENAMED = [
    (run.command, "--plan-cache", "--memory"),
    (tune.list_command, "--plan-cache", "--memory"),
    (plan_command, "--collocation", "--background"),
]


@click.command()
@click.option("--file", cls=RenamedOption, former=("--path",))
def show(file: str | None) -> None:
    click.echo(file)


@pytest.mark.parametrize("given", [["--path", "a"], ["--path=a"], ["--file", "a"]])
def test_each_name_gives_the_value(given: list[str]) -> None:
    assert CliRunner().invoke(show, given).output == "a\n"


def test_a_former_name_without_its_value_is_refused() -> None:
    assert CliRunner().invoke(show, ["--path"]).exit_code == 2


@pytest.mark.parametrize(("command", "name", "former"), RENAMED)
def test_a_former_name_is_accepted(
    command: click.Command, name: str, former: str
) -> None:
    (option,) = (p for p in command.params if name in p.opts)
    assert isinstance(option, RenamedOption)
    assert former in option.former


@pytest.mark.parametrize(("command", "name", "former"), RENAMED)
def test_the_help_shows_the_present_name(
    command: click.Command, name: str, former: str
) -> None:
    assert f"  {name} " in CliRunner().invoke(command, ["--help"]).output
    assert f"  {former} " not in CliRunner().invoke(command, ["--help"]).output


def test_run_takes_a_former_name_before_options_of_torchrun() -> None:
    with click.Context(run.command) as context:
        given = ["--standalone", "--memory", "off", "train.py"]
        run.command.parse_args(context, given)
    assert context.params["plan_cache"] == "off"
    assert context.params["arguments"] == ("--standalone", "train.py")
