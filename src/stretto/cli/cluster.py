"""``stretto cluster``: the group of its commands."""

from __future__ import annotations

import importlib

import click

_MODULES = {
    "start": "stretto.cli._cluster_engine",
    "down": "stretto.cli._cluster_engine",
    "status": "stretto.cli._cluster_engine",
    "submit": "stretto.cli._cluster_jobs",
    "list": "stretto.cli._cluster_jobs",
    "show": "stretto.cli._cluster_jobs",
    "logs": "stretto.cli._cluster_jobs",
    "stop": "stretto.cli._cluster_jobs",
    "drain": "stretto.cli._cluster_jobs",
    "events": "stretto.cli._cluster_jobs",
    "simulate": "stretto.cli._cluster_simulate",
}
"""Module by command; it holds ``NAME_command``."""


class _LazyGroup(click.Group):
    """Commands whose modules are imported when they are called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(_MODULES[cmd_name])
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group(cls=_LazyGroup)
def command() -> None:
    """Run and simulate many jobs on many devices."""
