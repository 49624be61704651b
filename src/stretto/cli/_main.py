"""The group of commands, and how errors become exit codes.

Exit codes: 0 done, 1 failed, 2 wrong input, 3 no feasible plan, or changes found by
``convert --check``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from typing import Any

import click

from stretto._version import __version__
from stretto.errors import StrettoError

COMMANDS = {
    "burst": "Plan how many GPUs each layer gets (burst parallelism).",
    "cluster": "Run and simulate many jobs on many devices.",
    "compare": "Compare all planners on one workload and cluster.",
    "convert": "Turn training code for one device into distributed code.",
    "demo": "Run the main job end to end on this machine.",
    "doctor": "Report what this machine supports, and what is wrong.",
    "lab": "Emulate a cluster on one machine.",
    "plan": "Make a plan for a workload on a cluster.",
    "probe": "Measure the process group's network, and write a cluster file.",
    "profile": "Measure a job, and write a workload file.",
    "replay": "Execute a plan on the running ranks, with waiting as computation.",
    "report": "Draw measurements and predictions on an HTML page.",
    "reproduce": "Recompute the papers' tables, and list their errors.",
    "run": "Launch a script as torchrun does, with stretto's DDP.",
    "simulate": "Predict what a plan will do.",
    "tune": "Show or delete plans that earlier runs kept.",
    "zoo": "Write the papers' models and testbeds as files.",
}
"""Names and one-line helps; module ``stretto.cli.NAME`` holds ``command``."""


class LazyGroup(click.Group):
    """Group of commands whose modules are imported when a command is called.

    Listing commands imports nothing: ``stretto --help`` does not load torch.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"stretto.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the commands from the table, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stretto")
def group() -> None:
    """Overlap communication with computation in synchronous training.

    Measure a job and a network, plan, predict, run, compare. Start with `stretto demo`.
    """


def main(args: list[str] | None = None, **extra: Any) -> None:
    """Run the command line and exit with its code."""
    try:
        group.main(args=args, prog_name="stretto", **extra)
    except StrettoError as error:
        # What a file says must not control the terminal.
        text = "".join(
            c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(error)
        )
        click.echo(f"stretto: error: {text}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        # A pipe that its reader has closed is click's: it ends silently.
        if not _is_of_output(error):
            raise
        _drop_output()
        why = f"the output cannot be written: {error.strerror}"
        click.echo(f"stretto: error: {why}", err=True)
        sys.exit(1)


def _is_of_output(error: OSError) -> bool:
    """Return whether an error comes from printing, which is all by `click.echo`."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is click.echo.__code__ for frame, _ in frames)


def _drop_output() -> None:
    """Let the end of the interpreter not try to write what is left, and fail."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
