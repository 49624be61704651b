"""``stretto run``: an unmodified DDP script on our DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stretto import variable_names
from stretto.cli._elastic import MODULE, OPTIONS, run_elastic
from stretto.cli._outputs import OutputCommand, why_not_writable
from stretto.cli._rank_options import check_options
from stretto.cli._values import RenamedOption
from stretto.errors import SpecError, StrettoError
from stretto.main_module import require_script

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

SETTINGS = {
    "plan": variable_names.PLAN,
    "save_plan": variable_names.SAVE_PLAN,
    "profile": variable_names.PROFILE,
    "cluster": variable_names.CLUSTER,
    "trace": variable_names.TRACE,
    "report": variable_names.REPORT,
    "tuning": variable_names.TUNING,
    "plan_cache": variable_names.PLAN_CACHE,
    "lane_backend": variable_names.LANE_BACKEND,
    "overlap": variable_names.OVERLAP,
    "clipping": variable_names.CLIPPING,
    "resume": variable_names.RESUME,
    "foreground": variable_names.FOREGROUND,
    "background": variable_names.BACKGROUND,
    "segments": variable_names.BACKGROUND_SEGMENTS,
    "max_loss": variable_names.BACKGROUND_MAX_LOSS,
    "collocation": variable_names.BACKGROUND_COLLOCATION,
    "names": variable_names.BACKGROUND_NAMES,
}
"""Options, and the environment variables that pass them to ranks."""


class _Command(OutputCommand):
    """Accepts stretto's options before, between and after torchrun's."""

    written = frozenset(
        {"save_plan", "profile", "cluster", "trace", "report", "tuning"}
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *getattr(param, "former", ()))
        }
        return super().parse_args(ctx, _sorted(args, takes_value))


def _sorted(args: list[str], takes_value: dict[str, bool]) -> list[str]:
    """Return stretto's options first, then ``--`` and everything else.

    Everything after the script, or after ``--``, is the script's.
    """
    ours: list[str] = []
    others: list[str] = []
    left = list(args)
    while left and left[0] != "--" and left[0].startswith("-"):
        option = left.pop(0)
        name, separator, _ = option.partition("=")
        is_ours = name in takes_value
        found = ours if is_ours else others
        found.append(option)
        if separator or not left or left[0] == "--":
            continue
        if takes_value[name] if is_ours else _has_value(name):
            found.append(left.pop(0))
    if left and left[0] == "--" and not others:
        left.pop(0)  # click's own, as in `stretto run -- script.py`
    return [*ours, "--", *others, *left] if others or left else ours


def _has_value(name: str) -> bool:
    """Return whether a torchrun option is followed by its value."""
    if name.replace("_", "-") in OPTIONS:  # without torch, which keepers never load
        return True
    known = _torchrun_options()
    if name not in known:  # argparse accepts a unique beginning
        actions = {id(a): a for text, a in known.items() if text.startswith(name)}
        return len(actions) == 1 and next(iter(actions.values())).nargs != 0
    return bool(known[name].nargs != 0)


@functools.cache
def _torchrun_options() -> dict[str, argparse.Action]:
    """Return torchrun's options by name."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()._option_string_actions  # noqa: SLF001


@click.command(cls=_Command)
@click.option(
    "--plan",
    metavar="auto|ddp|FILE",
    default="auto",
    show_default=True,
    help="Plan from the first steps, keep DDP's buckets, or apply a plan file.",
)
@click.option("--save-plan", metavar="FILE", help="Save the plan to this file.")
@click.option(
    "--profile", metavar="FILE", help="Save the measured workload to this file."
)
@click.option(
    "--cluster", metavar="FILE", help="Save the measured cluster to this file."
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Save eight measured steps of all ranks, after tuning has settled, as a "
    "timeline to this file.",
)
@click.option("--report", metavar="FILE", help="Save an HTML report to this file.")
@click.option(
    "--tuning", metavar="FILE", help="Save what tuning tried, and why, to this file."
)
@click.option(
    "--plan-cache",
    cls=RenamedOption,
    former=("--memory",),
    metavar="FILE|off",
    help="Cache of settled plans for the next run.  [default: a file in the user's "
    "cache folder]",
)
@click.option(
    "--lane-backend",
    metavar="NAME",
    help="Backend of the lanes: local is shared memory, for ranks on one host; "
    "hierarchical is that within hosts and Gloo across.  "
    "[default: the process group's own]",
)
@click.option(
    "--overlap",
    type=click.Choice(["backward", "forward", "auto"]),
    help="Overlap communication with backward only, or (experimental) also with the "
    "next forward: forward requires a plan that was made for it, auto uses it where "
    "that is faster.  [default: backward]",
)
@click.option(
    "--clipping",
    type=click.Choice(["exact", "parts"]),
    help="With parts (experimental), clipping by the global norm also overlaps with "
    "the next forward, where a plan does; the last bits of the norm change.  "
    "[default: exact]",
)
@click.option(
    "--foreground",
    metavar="DEVICE",
    help="Let a background use this device while a rank waits: cpu:{local_rank}, "
    "cuda:{local_rank} or exclusive:NAME, as the background names it. {rank} and "
    "{local_rank} are filled in.",
)
@click.option(
    "--background",
    metavar="DEVICE",
    help="Run SCRIPT in one process, in the idle time of this device's foreground; "
    "without a foreground all the time.",
)
@click.option(
    "--segments",
    type=click.Choice(["micro-batch", "layer"]),
    help="With --background: what one task is.  [default: micro-batch]",
)
@click.option(
    "--max-loss",
    metavar="SHARE",
    help="With --background: permitted loss of the foreground.  [default: 0.05]",
)
@click.option(
    "--collocation",
    metavar="FILE",
    help="With --background: add what both jobs lose and get to this file, for "
    "`stretto burst plan --collocation FILE`.",
)
@click.option(
    "--names",
    metavar="FOREGROUND:BACKGROUND",
    help="With --collocation: the jobs' names.  [default: foreground:background]",
)
@click.option(
    "--convert",
    is_flag=True,
    help="Convert SCRIPT, or a notebook, from one device to several when it is loaded.",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    help="(Experimental) Continue with the remaining ranks when one is lost, for a "
    "script that uses stretto.Elastic. Start it on each host, as torchrun.",
)
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    help="(Experimental) Whether a script that uses stretto.Elastic with a checkpoint "
    "folder resumes from the newest snapshot.  [default: auto]",
)
@click.argument(
    "arguments",
    nargs=-1,
    type=click.UNPROCESSED,
    required=True,
    metavar="SCRIPT [SCRIPT ARGUMENTS]",
)
def command(
    arguments: tuple[str, ...],
    convert: bool,
    elastic: str | None,
    **settings: str | None,
) -> None:
    """Launch SCRIPT as torchrun does, with stretto's DistributedDataParallel.

    stretto run [OPTIONS AND TORCHRUN OPTIONS] SCRIPT [SCRIPT ARGUMENTS]

    stretto run [OPTIONS AND TORCHRUN OPTIONS] -m MODULE [ARGUMENTS]

    The script needs no change. Where a launcher has already set RANK and WORLD_SIZE
    (torchrun, `stretto lab run`, a scheduler), the script runs as that rank in this
    process. Otherwise torchrun starts it with its own options, for instance
    `stretto run --nproc-per-node 4 train.py`. If a script starts its own ranks
    (torch.multiprocessing.spawn), change its import with
    `stretto convert SCRIPT -o NEW` and start it with python instead.

    With --convert the script may be one for a single device. It is converted in memory,
    as `stretto convert` does, and runs on every GPU of this machine, or on 2 ranks if
    there is no GPU, unless --nproc-per-node is given.
    """
    _check_files(settings)
    _check_background(settings)
    for option, variable in SETTINGS.items():
        if (value := settings[option]) is not None:
            os.environ[variable] = value
    if convert:
        os.environ[variable_names.CONVERT] = "1"
    overlap = os.environ.get(SETTINGS["overlap"], "")
    if elastic is not None:
        run_elastic(elastic, arguments, settings, overlap=overlap, convert=convert)
        return
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() or settings["background"]:
        _run_here(arguments)
    else:
        check_options(settings["plan"], settings["lane_backend"], overlap)
        _launch(arguments, convert=convert)


def _run_here(arguments: tuple[str, ...]) -> None:
    from stretto.script import run_module, run_script

    script, *rest = arguments
    if script in ("-m", "--module") and rest:
        run_module(rest[0], rest[1:])
        return
    if script.startswith("-"):
        if {"RANK", "WORLD_SIZE"} - os.environ.keys():
            raise click.UsageError(
                "with --background the script is one process, which torchrun does not "
                f"start: its options such as {script} have no effect. Put SCRIPT first."
            )
        raise click.UsageError(
            "RANK and WORLD_SIZE are set, so this is one rank of a job that another "
            f"launcher started: torchrun options such as {script} have no effect here. "
            "Put SCRIPT first."
        )
    run_script(script, rest)


def _launch(arguments: tuple[str, ...], *, convert: bool) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parsed = parser.parse_args(list(arguments))
    if parsed.no_python:
        raise SpecError(
            "--no-python starts a program that is not Python, in which "
            "DistributedDataParallel cannot be replaced: use torchrun"
        )
    script = Path(parsed.training_script)
    if not parsed.module:
        require_script(script)
    if convert:
        if parsed.module:
            raise SpecError("--convert needs the path of a script, not a module (-m)")
        _check_conversion(script)
        _all_local_ranks(parsed, arguments)
    given = [parsed.training_script]
    if parsed.module:
        given.insert(0, MODULE)
    parsed.module = True
    parsed.run_path = False  # every script runs in the interpreter of its rank's module
    parsed.training_script = "stretto.script"
    parsed.training_script_args = [*given, *parsed.training_script_args]
    try:
        with _one_line_errors():
            run(parsed)
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        code = failure.exitcode
        click.echo(
            f"stretto run: rank {rank} failed with exit status {code}; see its own "
            "message above",
            err=True,
        )
        sys.exit(code if code > 0 else 128 - code)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raise what torchrun raises before it starts ranks as errors of one line.

    Ranks are other processes, so nothing of the script raises here.

    Raises:
        SpecError: torchrun refuses the value of an option.
        StrettoError: the launchers cannot meet.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except (ValueError, AssertionError, OSError) as error:
        # The agent's own checks carry no text.
        reason = _one_line(error) or (
            "--nproc-per-node and --monitor-interval must be greater than 0"
        )
        raise SpecError(f"torchrun refuses its options: {reason}") from error
    except (RendezvousError, DistError) as error:
        reason = _one_line(error) or type(error).__name__
        raise StrettoError(
            f"torchrun started no ranks: {reason}; check --master-addr, --master-port "
            "or --rdzv-endpoint, and that the other hosts are started"
        ) from error


def _one_line(error: Exception) -> str:
    """Return the first line of an error's text, without the stack that may follow."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def _check_conversion(script: Path) -> None:
    """Refuse once, instead of on each rank, and print the open questions."""
    from stretto.convert import Choices, conversion_to_run, open_questions

    conversion = conversion_to_run(script, Choices())
    for question in open_questions(conversion):
        click.echo(f"stretto run --convert: {script.name}: {question}", err=True)


def _all_local_ranks(parsed: Any, arguments: tuple[str, ...]) -> None:
    """Return one rank per GPU if the number was not given, 2 without a GPU."""
    import torch

    before = arguments[: arguments.index(parsed.training_script)]
    names = {option.partition("=")[0].replace("_", "-") for option in before}
    if "--nproc-per-node" not in names and "PET_NPROC_PER_NODE" not in os.environ:
        parsed.nproc_per_node = str(torch.cuda.device_count() or 2)
    if not names & {"--nnodes", "--master-addr", "--master-port", "--rdzv-endpoint"}:
        # Use a separate port, so that several such runs do not collide.
        parsed.standalone = True


def _check_background(settings: dict[str, str | None]) -> None:
    for option in ("foreground", "background"):
        # An empty name, such as an unset variable of a shell's, would mean no device.
        device = settings[option]
        if device is not None and not device.strip():
            raise click.UsageError(f"--{option} needs the name of a device, got ''")
    if settings["names"] is not None and settings["collocation"] is None:
        raise click.UsageError("--names needs --collocation FILE")
    if settings["background"] is None:
        for option in ("segments", "max_loss", "collocation"):
            if settings[option] is not None:
                name = f"--{option.replace('_', '-')}"
                raise click.UsageError(f"{name} needs --background DEVICE")
    elif settings["foreground"] is not None:
        raise click.UsageError("give either --foreground or --background")


def _check_files(settings: dict[str, str | None]) -> None:
    plan = settings["plan"]
    if plan not in ("auto", "ddp", None) and not Path(plan).is_file():
        raise click.BadParameter(
            f"{plan!r} is neither auto, ddp nor a file", param_hint="--plan"
        )
    for option in (
        "save_plan",
        "profile",
        "cluster",
        "trace",
        "report",
        "tuning",
        "collocation",
    ):
        value = settings[option]
        why = None if value is None else why_not_writable(Path(value))
        if why is not None:
            name = f"--{option.replace('_', '-')}"
            raise click.BadParameter(
                f"{value}: cannot be written: {why}", param_hint=name
            )
