"""``stretto lab``: an emulated cluster on one machine."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from stretto.cli._lab_options import hosts_option, ranks_per_host_option
from stretto.cli._values import Rate, Real
from stretto.errors import CommandNotFound
from stretto.lab import LabSpec, Mode, run_lab
from stretto.lab.spec import MIN_RATE_BYTES_PER_S

if TYPE_CHECKING:
    from types import FrameType

COMMAND_NOT_FOUND = 127
"""Exit status for a missing command, as in a shell."""


@click.group()
def command() -> None:
    """Emulate a cluster on one machine."""


@command.command(context_settings={"allow_interspersed_args": False})
@hosts_option
@ranks_per_host_option
@click.option(
    "--link",
    "link_bytes_per_s",
    type=Rate(least=MIN_RATE_BYTES_PER_S),
    default="1gbit",
    show_default=True,
    metavar="RATE",
    help="Largest total rate that a host can send.",
)
@click.option(
    "--flow",
    "flow_bytes_per_s",
    type=Rate(least=MIN_RATE_BYTES_PER_S),
    default=None,
    metavar="RATE",
    help="Largest rate of one TCP connection. [default: the link]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Real(min=0, min_open=True),
    default=None,
    metavar="SECONDS",
    help="Stop all ranks after this time, with exit status 124.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Real(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the other ranks may continue after a rank has failed.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Break something, for instance 'kill host1 at step 40' or 'disconnect host2 "
    "at 3 s for 1 s' (repeatable). Verbs: kill, terminate, stop, hang, slow, fill-disk "
    "for hostN, rankN or memberN; disconnect, drop-output, drop-input, lose, "
    "change-bytes, restart for hostN. memberN is the rank with that number in "
    "`stretto run --elastic`. Other ranks then continue when one ends.",
)
@click.option(
    "--logs",
    type=click.Path(file_okay=False),
    default=None,
    metavar="FOLDER",
    help="Keep every rank's output in this folder, as rank0.log, rank1.log, ...",
)
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in Mode]),
    default=Mode.AUTO.value,
    show_default=True,
    help="Namespaces, or paced: limits connections on loopback, but not links.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    hosts: int,
    ranks_per_host: int,
    link_bytes_per_s: float,
    flow_bytes_per_s: float | None,
    timeout_s: float | None,
    grace_s: float,
    faults: tuple[str, ...],
    logs: str | None,
    mode: str,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM on every rank of an emulated cluster.

    Each rank's environment has the variables that torchrun would set. Rank 0's output
    is shown. When a rank fails, the others are stopped, and its exit status is
    returned.

    \b
    stretto lab run --hosts 4 --link 1gbit --flow 300mbit -- python train.py
    """  # noqa: D301
    spec = LabSpec(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        link_bytes_per_s=link_bytes_per_s,
        flow_bytes_per_s=flow_bytes_per_s,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_by_signal)
    try:
        status = run_lab(
            spec,
            program,
            mode=mode,
            timeout_s=timeout_s,
            grace_s=grace_s,
            faults=faults,
            logs=logs,
        )
    except CommandNotFound as error:
        click.echo(f"stretto: error: {error}", err=True)
        status = COMMAND_NOT_FOUND
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)


def _exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by unwinding, so that the lab is stopped on the way out."""
    del frame
    sys.exit(128 + number)
