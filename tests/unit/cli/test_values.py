"""Numbers on the command line are checked by the parser, which names the option."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest

from stretto.cli import _values
from stretto.cli._main import group, main

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKED = (
    _values.Whole,
    _values.Real,
    _values.Size,
    _values.Rate,
    _values.WholeNumbers,
    _values.Sizes,
)


def _options(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[str, click.Option]]:
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _options(inner, (*path, name))
        return
    for option in command.params:
        if isinstance(option, click.Option):
            yield " ".join((*path, max(option.opts, key=len))), option


OPTIONS = dict(_options(group, ()))
NUMBERS = {name: o for name, o in OPTIONS.items() if isinstance(o.type, CHECKED)}


def test_every_number_is_checked() -> None:
    plain = (click.types.IntParamType, click.types.FloatParamType)
    unchecked = [
        name
        for name, option in OPTIONS.items()
        if isinstance(option.type, plain) and not isinstance(option.type, CHECKED)
    ]
    assert unchecked == []
    assert len(NUMBERS) > 60


@pytest.mark.parametrize(
    ("kind", "text"),
    [(_values.Whole(1), "a valid integer."), (_values.Real(0.0), "a valid number.")],
)
def test_text_that_is_no_number_is_called_so(
    kind: click.ParamType[object], text: str
) -> None:
    with pytest.raises(click.BadParameter, match=f"'x' is not {text}"):
        kind.convert("x", None, None)


@pytest.mark.parametrize("value", ["-1", "nan", "1e99", "inf", "", "9" * 23])
def test_a_wrong_number_is_an_error_that_names_the_option(value: str) -> None:
    for name, option in NUMBERS.items():
        given = (value,) if option.multiple else value
        with pytest.raises(click.BadParameter) as raised:
            option.process_value(click.Context(click.Command("x")), given)
        text = raised.value.format_message()
        assert name.rpartition(" ")[2] in text, name
        assert "\n" not in text, name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["demo", "--batch", "0"], "--batch"),
        (["demo", "--steps", "5"], "--steps"),
        (["demo", "--model", "transformer", "--width", "7"], "--width"),
        (["demo", "--flow", "0gbit"], "--flow"),
        (["lab", "run", "--hosts", "0", "true"], "--hosts"),
        (["lab", "run", "--link", "1kbit", "true"], "--link"),
        (["zoo", "show", "vgg16", "-o", "x", "--forward-s", "1"], "--backward-s"),
    ],
)
def test_an_error_of_a_command_names_the_option(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(options)
    assert raised.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
