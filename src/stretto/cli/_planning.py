"""What the planning commands share."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stretto.errors import StrettoError
from stretto.planners.joint import DIMS, RUNNABLE_DIMS
from stretto.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.schema import Plan

_Command = TypeVar("_Command", bound="Callable[..., Any]")


class Size(click.ParamType[int]):
    """Bytes with a unit: ``25MiB``."""

    name = "size"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Whole bytes, or a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except StrettoError as error:
            self.fail(str(error), param, ctx)


_PLANNER_OPTIONS = {
    "cap_bytes": ("--cap", Size(), "ddp: cap of a bucket, for instance 25MiB"),
    "first_cap_bytes": (
        "--first-cap",
        Size(),
        "ddp: cap of the first bucket; 1MiB, or --cap where given",
    ),
    "fusion_bytes": ("--fusion-buffer", Size(), "horovod: size of the fusion buffer"),
    "cycle_s": ("--cycle-ms", click.FLOAT, "horovod: milliseconds of a cycle"),
    "unit_bytes": ("--unit", Size(), "aiacc: size of a unit"),
    "lanes": ("--lanes", click.IntRange(min=1), "aiacc: number of lanes"),
    "max_lanes": (
        "--max-lanes",
        click.IntRange(min=1),
        "joint, aiacc, exhaustive: the most lanes that a plan may use",
    ),
    "dims": (
        "--dims",
        click.STRING,
        (
            f"joint, exhaustive: what may be chosen: all, or some of {','.join(DIMS)}; "
            f"else {','.join(RUNNABLE_DIMS)}, which the runtime carries out"
        ),
    ),
    "time_limit_s": (
        "--time-limit",
        click.FloatRange(min=0, min_open=True),
        "joint: seconds after which the search takes the best it has",
    ),
    "sturdy": (
        "--sturdy/--fastest",
        click.BOOL,
        (
            "joint: near the fastest plan one that bears a slower backward "
            "(default), or the fastest"
        ),
    ),
}


def planner_options(command: _Command) -> _Command:
    """Gives a command the options of every planner, under the planners' own names."""
    for name, (flag, kind, text) in reversed(_PLANNER_OPTIONS.items()):
        command = click.option(flag, name, type=kind, default=None, help=text)(command)
    for name in reversed(DIMS):
        text = f"joint, exhaustive: {name} may not be chosen"
        command = click.option(f"--no-{name}", is_flag=True, help=text)(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The planner options that stand on the command line, in SI units."""
    chosen = {k: v for k, v in options.items() if v is not None}
    if "cycle_s" in chosen:
        chosen["cycle_s"] /= 1e3
    closed = [name for name in DIMS if chosen.pop(f"no_{name}", False)]
    if closed:
        names = chosen.get("dims", ",".join(RUNNABLE_DIMS))
        names = DIMS if names == "all" else names.split(",")
        chosen["dims"] = tuple(name for name in names if name not in closed)
    return chosen


def row_of(plan: Plan) -> dict[str, Any]:
    """What the commands say about a plan, before anything that was timed."""
    prediction = plan.predicted
    if prediction is None:
        raise AssertionError("a planner's plan carries its prediction")
    return {
        "planner": plan.planner,
        "iteration_s": prediction.iteration_s,
        "backward_s": prediction.backward_s,
        "exposed_communication_s": prediction.exposed_communication_s,
        "lower_bound_s": prediction.lower_bound_s,
        "gap": prediction.gap,
        "lanes": plan.lanes,
        "buckets": len(plan.buckets),
    }


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows what is going on while it goes on, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    click.echo(f"{text} ...", nl=False, err=True)
    try:
        yield
    finally:
        click.echo("\r\033[K", nl=False, err=True)


def json_text(value: Any) -> str:
    """One line of JSON."""
    import json

    return json.dumps(value)
