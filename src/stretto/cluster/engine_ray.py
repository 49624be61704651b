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
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cluster.folders import RaySettings
from stretto.cluster.part_spec import write_private
from stretto.errors import ClusterError, MissingPackage, SpecError
from stretto.lab.ports import free_port

if TYPE_CHECKING:
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

_CHECK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
except AuthenticationError:
    print("refused")
except Exception as error:
    print("failed", str(error).splitlines()[0])
else:
    print("open")
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
    answer = _answer_of(address, None)
    if answer == "open":
        if is_insecure:
            return RaySettings(
                address=address, namespace=_namespace(), is_started=False
            )
        raise ClusterError(
            f"the Ray at {address} asks for no token: any process that reaches it can "
            "run code as its user. Start it with RAY_AUTH_MODE=token, or pass "
            "--insecure"
        )
    if answer != "refused":
        raise ClusterError(f"the Ray at {address} does not answer: {answer}")
    token = _user_token()
    if token is None:
        raise SpecError(
            f"the Ray at {address} asks for a token: name its file in "
            "RAY_AUTH_TOKEN_PATH, or copy it to ~/.ray/auth_token"
        )
    _check_token(token)
    answer = _answer_of(address, token)
    if answer == "refused":
        raise ClusterError(
            f"the Ray at {address} refuses the token in {token}: name the file of its "
            "own token in RAY_AUTH_TOKEN_PATH"
        )
    if answer != "open":
        raise ClusterError(
            f"the Ray at {address} does not answer with the token in {token}: {answer}"
        )
    return RaySettings(
        address=address, namespace=_namespace(), is_started=False, token=str(token)
    )


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


def _answer_of(address: str, token: Path | None) -> str:
    """Return how a head answers a client with the token of a file, or with none.

    ``open`` or ``refused``; other texts say why there is no answer.
    """
    host, _, port = address.rpartition(":")
    try:  # a client of Ray would try again and again
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        return str(error)
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
        return f"no answer within {_CHECK_S:g} s"
    words = [line for line in done.stdout.splitlines() if line.strip()]
    return words[-1].removeprefix("failed ") if words else f"exit {done.returncode}"


def how_to_join(ray: RaySettings) -> str:
    """Return how another host joins the Ray of a cluster; one line, maybe empty."""
    if not ray.is_started:
        return ""
    variables = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={ray.token}"
    command = f"ray start --block --address={ray.address}"
    return (
        f"another host joins by `umask 077; {variables} RAY_worker_niceness=0 "
        f"{command}`, with a copy of that file"
    )
