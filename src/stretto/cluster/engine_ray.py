"""A cluster on Ray: settings for a Ray that is started here, or that runs already.

Ray says which hosts there are, passes messages, and restarts what serves a host. The
coordinator, its store, agents and supervisors are the local engine's: see
`ray_gateway`, `ray_actor` and `ray_head`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import re
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cluster.folders import RaySettings
from stretto.cluster.part_spec import write_private
from stretto.errors import ClusterError, MissingPackage, SpecError
from stretto.lab.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.cluster.folders import Folders

OLDEST = (2, 59)
"""Earlier versions have no tokens, or known ways around them."""

_ADDRESS = re.compile(r"[^:/\s]+:([0-9]{1,5})")
_MAX_PORT = 65535
_DEFAULT_TOKEN = Path(".ray") / "auth_token"
_CHECK_S = 60.0
_CONNECT_S = 5.0

_BROADCAST = ipaddress.IPv4Address("255.255.255.255")

_MAX_TEMP = 38
"""Characters: with them, and 70 of Ray's, the paths of its sockets are full."""

OPEN, REFUSED = "open", "refused"
"""Answers of a head to a client; other ones say why there is no answer."""

_CHECK = """
import json
import sys
import time
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    client = GcsClient(address=sys.argv[1])
    for _ in range(40):  # a Ray that has just started has no node yet
        nodes = client.get_all_node_info(timeout=10).values()
        nodes = [node.node_manager_address for node in nodes if node.state == 0]
        if nodes:
            break
        time.sleep(0.5)
    data = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster")
except AuthenticationError:
    print("refused")
except Exception as error:
    print("failed", str(error).splitlines()[0])
else:
    data = json.loads(data or b"{}")
    print("open", json.dumps(data | {"nodes": nodes}))
"""


def require_ray() -> None:
    """Check that a usable Ray is installed.

    Raises:
        MissingPackage: it is missing or too old.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingPackage(
            'a cluster on Ray needs Ray on every host: run `pip install "'
            'stretto[cluster]"`, or start one on this machine with --local N'
        )
    version = importlib.metadata.version("ray")
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(map(int, numbers)) < OLDEST:
        raise MissingPackage(
            f"Ray {version} is too old, {OLDEST[0]}.{OLDEST[1]} is needed for its "
            'tokens: run `pip install --upgrade "stretto[cluster]"`'
        )


def started_ray(folders: Folders, interface: str) -> RaySettings:
    """Return settings for a Ray that the cluster starts and ends.

    Args:
        folders: of the cluster; its token is created, for this user alone.
        interface: address of this host at which other hosts reach it.

    Raises:
        SpecError: this host has no such address.
        ClusterError: a folder cannot be used.
    """
    require_ray()
    _check_interface(interface)
    folders.create()
    token = folders.ray_token
    try:
        _check_token(token)
    except SpecError:  # missing, or cut by a full disk
        try:
            write_private(token, secrets.token_hex(32))
        except OSError as error:
            raise ClusterError(f"{token}: cannot be written: {error}") from error
    return RaySettings(
        address=f"{interface}:{free_port()}",
        namespace=_namespace(),
        is_started=True,
        temp=str(_temp(folders)),
        token=str(token),
    )


def _check_interface(address: str) -> None:
    try:
        found = ipaddress.IPv4Address(address)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"--interface {address}: must be an IPv4 address of this machine ({error})"
        ) from error
    if found.is_unspecified or found.is_multicast or found == _BROADCAST:
        raise SpecError(
            f"--interface {address}: must be an IPv4 address of this machine alone, at "
            "which others reach it"
        )


def _temp(folders: Folders) -> Path:
    """Return a folder with a short path, in one that is this user's alone.

    Ray opens its own folder to all users.
    """
    digest = hashlib.sha256(str(folders.root).encode()).hexdigest()[:8]
    name = f"stretto-{os.geteuid()}-{digest}"
    above = Path(tempfile.gettempdir()) / name
    if len(str(above)) > _MAX_TEMP:
        above = Path("/tmp") / name
    above.mkdir(mode=0o700, exist_ok=True)
    found = above.lstat()
    is_own = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
    if not is_own or found.st_mode & 0o077:
        raise ClusterError(
            f"{above} is not a folder of this user alone: remove it, or set TMPDIR"
        )
    return above / "r"


def joined_ray(address: str, *, is_insecure: bool) -> RaySettings:
    """Return settings for a Ray that runs already.

    Args:
        address: host and port of its head.
        is_insecure: join it even if it lets anybody in.

    Raises:
        SpecError: the address has another form, or no token is known or readable.
        ClusterError: nothing answers, the token is refused, or anybody is let in.
    """
    require_ray()
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found[1]) <= _MAX_PORT:
        raise SpecError(
            f"--ray {address}: must be HOST:PORT of a head of Ray, with a port of 1 to "
            f"{_MAX_PORT}"
        )
    answer, facts = _answer_of(address, None)
    if answer == OPEN:
        if is_insecure:
            return _joinable(address, facts)
        raise ClusterError(
            f"the Ray at {address} asks for no token: any process that reaches it can "
            "run code as its user. Start it with RAY_AUTH_MODE=token, or pass "
            "--insecure"
        )
    if answer != REFUSED:
        raise ClusterError(f"the Ray at {address} does not answer: {answer}")
    token = _user_token()
    if token is None:
        named = os.environ.get("RAY_AUTH_TOKEN_PATH")
        raise SpecError(
            f"the Ray at {address} asks for a token: name its file in "
            "RAY_AUTH_TOKEN_PATH, or copy it to ~/.ray/auth_token"
            + (f". Now it names {named}, which is not a file" if named else "")
        )
    _check_token(token)
    answer, facts = _answer_of(address, token)
    if answer == REFUSED:
        raise ClusterError(
            f"the Ray at {address} refuses the token in {token}: name the file of its "
            "own token in RAY_AUTH_TOKEN_PATH"
        )
    if answer != OPEN:
        raise ClusterError(
            f"the Ray at {address} does not answer with the token in {token}: {answer}"
        )
    return _joinable(address, facts, str(token))


def _joinable(address: str, facts: Mapping[str, Any], token: str = "") -> RaySettings:
    """Return settings for a Ray, by what its head has said of it.

    Raises:
        ClusterError: Ray's client would refuse it, on its own only after minutes.
    """
    theirs = facts.get("ray_version"), facts.get("python_version")
    ours = importlib.metadata.version("ray"), platform.python_version()
    if None not in theirs and theirs != ours:
        raise ClusterError(
            f"the Ray at {address} is Ray {theirs[0]} on Python {theirs[1]}, here is "
            f"Ray {ours[0]} on Python {ours[1]}: Ray needs the same on all hosts"
        )
    nodes = facts.get("nodes", [])
    if not any(map(_is_own, nodes)):
        raise ClusterError(
            f"no node of the Ray at {address} is this machine: join it first, by "
            f"`ray start --address={address}`"
        )
    return RaySettings(
        address=address,
        namespace=_namespace(),
        is_started=False,
        token=token,
        is_loopback="127.0.0.1" in nodes,
    )


def _is_own(address: str) -> bool:
    """Return whether an address is one of this machine's."""
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError):
        return False
    return True


def _namespace() -> str:
    return f"stretto-{uuid.uuid4().hex}"


def _user_token() -> Path | None:
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named).absolute() if named else Path.home() / _DEFAULT_TOKEN
    return path if path.is_file() else None


def _check_token(path: Path) -> None:
    """Require a file that Ray can read a token from; otherwise its clients abort.

    Raises:
        SpecError: it cannot be read, is empty, or holds something else.
    """
    try:
        text = path.read_bytes().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: a token cannot be read from it: {error}") from error
    if not text.isprintable() or not text:
        raise SpecError(f"{path}: holds no token of Ray, which is one line of text")


def _answer_of(address: str, token: Path | None) -> tuple[str, dict[str, Any]]:
    """Return how a head answers a client with the token of a file, or with none.

    `OPEN`, with what it says of its Ray, or `REFUSED`; other texts say why there is no
    answer.
    """
    host, _, port = address.rpartition(":")
    try:  # a client of Ray would try again and again
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        return str(error), {}
    variables = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    if token is None:
        variables["RAY_AUTH_MODE"] = "disabled"
    else:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHECK, address],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHECK_S:g} s", {}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if not lines:
        return f"exit {done.returncode}", {}
    if lines[-1].startswith(f"{OPEN} "):
        return OPEN, json.loads(lines[-1].removeprefix(OPEN))
    return lines[-1].removeprefix("failed "), {}


def how_to_join(ray: RaySettings) -> str:
    """Return how another host joins the Ray of a cluster; one line, maybe empty."""
    if not ray.is_started:
        return ""
    token = shlex.quote(ray.token)
    variables = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}"
    command = f"ray start --block --address={ray.address}"
    return (
        f"another host joins by `umask 077; {variables} RAY_worker_niceness=0 "
        f"{command}`, with a copy of that file"
    )
