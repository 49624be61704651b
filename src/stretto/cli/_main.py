"""The group of commands, and how errors become exit codes.

Exit codes: 0 done, 1 failed, 2 wrong input, 3 no feasible plan or a regression found.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from stretto._version import __version__
from stretto.errors import StrettoError

COMMANDS = {
    "burst": "how many GPUs each layer gets (burst parallelism)",
    "compare": "all planners on one workload and cluster, one row each",
    "convert": "training code for one device -> distributed code",
    "demo": "the main job end to end on this machine",
    "doctor": "what this machine can do, and what is wrong with it",
    "lab": "an emulated cluster on one machine",
    "plan": "a plan for a workload on a cluster",
    "probe": "measures the network of the process group -> cluster file",
    "profile": "measures a job -> workload file",
    "report": "an HTML page for what was measured and predicted",
    "reproduce": "the papers' tables that can be recomputed, with the errors",
    "run": "launch a script as torchrun does, with stretto's DDP",
    "simulate": "what a plan will do",
    "tune": "plans kept from earlier runs",
    "zoo": "the papers' models and testbeds as files",
}
"""Names and one-line helps; module ``stretto.cli.NAME`` holds ``command``."""


class LazyGroup(click.Group):
    """A group whose commands are imported when one of them is called.

    Listing them must not cost an import: ``stretto --help`` does not load torch.
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
        """Lists the commands from the table, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stretto")
def group() -> None:
    """Synchronous data-parallel training with communication overlapped.

    Measure a job and a network, plan, predict, run, compare. Begin with `stretto demo`.
    """


def main(args: list[str] | None = None, **extra: Any) -> None:
    """Runs the command line and exits with its code."""
    try:
        group.main(args=args, prog_name="stretto", **extra)
    except StrettoError as error:
        click.echo(f"stretto: error: {error}", err=True)
        sys.exit(error.exit_code)
