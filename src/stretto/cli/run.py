"""``stretto run``: an unmodified DDP script on our DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

SETTINGS = {
    "plan": "STRETTO_PLAN",
    "save_plan": "STRETTO_SAVE_PLAN",
    "profile": "STRETTO_PROFILE",
    "cluster": "STRETTO_CLUSTER",
    "trace": "STRETTO_TRACE",
    "report": "STRETTO_REPORT",
}
"""Options and the environment variables by which ranks learn of them."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--plan",
    metavar="auto|ddp|FILE",
    default="auto",
    show_default=True,
    help="Measure and plan in the first steps, leave DDP's rule, or obey a plan file.",
)
@click.option("--save-plan", metavar="FILE", help="Keep the plan that was made here.")
@click.option("--profile", metavar="FILE", help="Keep the measured workload here.")
@click.option("--cluster", metavar="FILE", help="Keep the measured cluster here.")
@click.option("--trace", metavar="FILE", help="Keep a measured step's timeline here.")
@click.option("--report", metavar="FILE", help="Keep an HTML report here.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def command(arguments: tuple[str, ...], **settings: str | None) -> None:
    """Launch SCRIPT as torchrun does, with every DistributedDataParallel ours.

    stretto run [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [SCRIPT ARGUMENTS]

    No line of the script changes. Where a launcher has already set RANK and
    WORLD_SIZE (torchrun, `stretto lab run`, a scheduler), the script runs as that
    rank in this process; otherwise torchrun starts it with its own options, for
    instance `stretto run --nproc-per-node 4 train.py`.
    """
    _check_files(settings)
    for option, variable in SETTINGS.items():
        if (value := settings[option]) is not None:
            os.environ[variable] = value
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        from stretto._api.script import run_script

        script, *rest = arguments
        if script.startswith("-"):
            raise click.UsageError(
                f"RANK and WORLD_SIZE are set, so this is one rank of a job that "
                f"something else launched: torchrun options such as {script} have no "
                "meaning here. Put SCRIPT first."
            )
        run_script(Path(script), rest)
        return
    from torch.distributed.run import main as torchrun

    at = _script_index(arguments)
    torchrun(
        [
            *arguments[:at],
            "--module",
            "stretto._api.script",
            *arguments[at:],
        ]
    )


def _check_files(settings: dict[str, str | None]) -> None:
    plan = settings["plan"]
    if plan not in ("auto", "ddp", None) and not Path(plan).is_file():
        raise click.BadParameter(
            f"{plan!r} is neither auto, ddp nor a file", param_hint="--plan"
        )
    for option in ("save_plan", "profile", "cluster", "trace", "report"):
        value = settings[option]
        if value is not None and not Path(value).absolute().parent.is_dir():
            raise click.BadParameter(
                f"folder {Path(value).parent} does not exist", param_hint=f"--{option}"
            )


def _script_index(arguments: tuple[str, ...]) -> int:
    """Where SCRIPT stands: torchrun's own parser knows which options take a value."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(list(arguments))
    at = len(arguments) - len(parsed.training_script_args) - 1
    if arguments[at] != parsed.training_script:
        click.echo(f"stretto run: no script found in {' '.join(arguments)}", err=True)
        sys.exit(2)
    return at
