"""``stretto run --elastic``: a keeper on each host, which starts the host's ranks.

Where a launcher starts several processes on a host, each is the keeper of one rank.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli._rank_options import check_options_apart
from stretto.errors import SpecError
from stretto.main_module import require_script
from stretto.members.launchers import placement_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.members.keeper import ElasticJob
    from stretto.members.launchers import Placement
    from stretto.members.meeting import MeetingPoint

MODULE = "-m"

_NOT_ELASTIC = ("background", "collocation", "trace", "report")
"""Options whose work keeps the ranks it began with."""

_PORT = 29500

HOST_OPTIONS = (
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-backend",
)
"""Options of torchrun about hosts, as far as they have a meaning here."""

_ADDRESSES = ("--master-addr", "--rdzv-endpoint")
"""Options that say where several hosts meet."""

OPTIONS = ("--nproc-per-node", *HOST_OPTIONS)
"""All options of torchrun that have one; each is followed by its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticArguments:
    """Options before the script, and the script."""

    ranks: int | None
    """Ranks of this host, if they were given."""

    hosts: dict[str, str]
    """Options about hosts."""

    script: tuple[str, ...]
    """The script and its arguments."""


def run_elastic(
    elastic: str,
    arguments: tuple[str, ...],
    settings: dict[str, str | None],
    *,
    overlap: str,
    convert: bool,
) -> None:
    """Run a script's ranks under a keeper; exit with their status.

    ``overlap`` is the one in force, or empty.

    Raises:
        SpecError: an option is invalid or not supported.
    """
    from stretto.members.keeper import RankKeeper

    refused = [f"--{name}" for name in _NOT_ELASTIC if settings[name] is not None]
    refused += ["--convert"] * convert
    if refused:
        raise SpecError(f"--elastic does not support {refused[0]} yet")
    job = elastic_job(elastic, parse_arguments(arguments), os.environ)
    check_options_apart(settings["plan"], settings["lane_backend"], overlap)
    sys.exit(RankKeeper(job).run())


def elastic_job(
    elastic: str, given: ElasticArguments, environment: Mapping[str, str]
) -> ElasticJob:
    """Return what this host's keeper runs.

    Raises:
        SpecError: an option is invalid, or does not fit what a launcher has started.
    """
    from stretto.members.keeper import ElasticJob

    least, most = parse_limits(elastic)
    hosts, ranks = dict(given.hosts), given.ranks
    place = placement_of(environment)
    shares_host = place is not None and (place.local_size or 1) > 1
    if place is not None:
        if shares_host and ranks not in (None, 1):
            raise SpecError(
                f"--nproc-per-node {ranks} has no effect here: a launcher has started "
                f"{place.local_size} processes on this host, of which each starts one "
                "rank. Leave the option out, or start one process per host."
            )
        hosts = _options_of(place) | hosts
        if ranks is None and place.size > 1:
            ranks = 1
    nodes = _number(hosts, "--nnodes", 1)
    if nodes < 1:
        raise SpecError("--nnodes must be 1 or more")
    if ranks is None:
        if nodes > 1:
            raise SpecError(
                "--elastic on several hosts needs --nproc-per-node, the number of "
                "ranks that each host begins with"
            )
        ranks = most
    # As with torchrun, one host needs no address, whatever its other options.
    meets = nodes > 1 or not hosts.keys().isdisjoint(_ADDRESSES)
    if not meets and not least <= ranks <= most:
        raise SpecError(f"--nproc-per-node {ranks} is not within --elastic {elastic}")
    if not 1 <= ranks <= most:
        raise SpecError(f"--nproc-per-node {ranks} is more than --elastic {elastic}")
    return ElasticJob(
        command=(sys.executable, "-m", "stretto.script", *given.script),
        ranks=ranks,
        min_ranks=least,
        max_ranks=most,
        meeting=_meeting(hosts, nodes) if meets else None,
        local_rank=0 if place is None or ranks > 1 else place.local_rank,
        local_size=None if place is None or ranks > 1 else place.local_size,
    )


def _options_of(place: Placement) -> dict[str, str]:
    """Return torchrun's options for a process that a launcher has started.

    It counts as a host, also where others of the job run on the same one.
    """
    options = {
        "--nnodes": str(place.size),
        "--node-rank": str(place.rank),
        "--master-addr": place.address,
        "--master-port": str(place.port),
    }
    return options if place.job is None else options | {"--rdzv-id": place.job}


def _meeting(hosts: dict[str, str], nodes: int) -> MeetingPoint:
    from stretto.members.meeting import MeetingPoint

    host, port = hosts.get("--master-addr", ""), _number(hosts, "--master-port", _PORT)
    if endpoint := hosts.get("--rdzv-endpoint"):
        host, colon, after = endpoint.rpartition(":")
        if not colon:
            host = endpoint
        elif after.isdecimal():
            port = int(after)
        else:
            raise SpecError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint!r}")
    host = host.strip("[]")
    if not host:
        raise SpecError(
            "--elastic on several hosts needs --master-addr or --rdzv-endpoint, the "
            "address of the first host"
        )
    if not 0 < port < 1 << 16:
        name = "--rdzv-endpoint" if endpoint else "--master-port"
        raise SpecError(f"the port of {name} must be 1 to 65535, got {port}")
    if hosts.get("--rdzv-backend", "static") not in ("static", "c10d"):
        raise SpecError("--elastic supports only --rdzv-backend static and c10d")
    node = _number(hosts, "--node-rank", -1)
    if node >= nodes:
        raise SpecError(
            f"--node-rank must be below --nnodes, which is {nodes}, got {node}"
        )
    return MeetingPoint(
        host=host,
        port=port,
        nodes=nodes,
        node=None if node < 0 else node,
        job=hosts.get("--rdzv-id", "none"),
        local=hosts.get("--local-addr"),
    )


def _number(hosts: Mapping[str, str], name: str, default: int) -> int:
    text = hosts.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise SpecError(f"{name} must be a number, got {text!r}")
    return int(text)


def parse_limits(text: str) -> tuple[int, int]:
    """Return the least and the most ranks that ``MIN:MAX`` says.

    Raises:
        SpecError: it says something else.
    """
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal()):
        raise SpecError(f"--elastic must be MIN:MAX, for instance 2:8, not {text!r}")
    if not 1 <= int(least) <= int(most):
        raise SpecError(f"--elastic {text}: MIN must be 1 or more, and at most MAX")
    return int(least), int(most)


def parse_arguments(arguments: tuple[str, ...]) -> ElasticArguments:
    """Take options of torchrun apart from the script and its arguments.

    Raises:
        SpecError: an option is not supported, or there is no script.
    """
    left = list(arguments)
    ranks: int | None = None
    hosts: dict[str, str] = {}
    while left and left[0].startswith("-") and left[0] not in ("-m", "--module"):
        name, separator, value = left.pop(0).partition("=")
        if name == "--":
            break
        name = name.replace("_", "-")
        if name not in OPTIONS:
            raise SpecError(f"--elastic does not support torchrun's {name} yet")
        if not separator and left:
            value = left.pop(0)
        if name in HOST_OPTIONS:
            hosts[name] = value
            continue
        if not value.isdecimal():
            raise SpecError(f"--nproc-per-node must be a number, got {value!r}")
        ranks = int(value)
    if not left:
        raise SpecError("there is no script to run")
    if left[0] in ("-m", "--module"):
        left[0] = MODULE
    else:
        require_script(Path(left[0]))
    return ElasticArguments(ranks=ranks, hosts=hosts, script=tuple(left))
