"""Options of the commands that build an emulated cluster: `demo` and `lab`."""

from __future__ import annotations

import click

from stretto.cli._values import Whole
from stretto.lab.spec import MAX_HOSTS, MAX_RANKS_PER_HOST

hosts_option = click.option(
    "--hosts",
    type=Whole(1, MAX_HOSTS),
    default=4,
    show_default=True,
    help="Emulated hosts.",
)
ranks_per_host_option = click.option(
    "--ranks-per-host",
    type=Whole(1, MAX_RANKS_PER_HOST),
    default=1,
    show_default=True,
    help="Processes per host.",
)
