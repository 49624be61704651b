"""``stretto cluster simulate``: replay a trace under several policies."""

from __future__ import annotations

import click


@click.command(name="simulate")
@click.argument("trace", type=click.Path())
def simulate_command(trace: str) -> None:
    """Replay TRACE, the jobs of a cluster, under several policies."""
    raise NotImplementedError(trace)
