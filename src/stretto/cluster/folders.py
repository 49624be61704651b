"""Where a cluster on this machine keeps its files: one folder, for this user alone."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto import variable_names
from stretto.cluster.part_spec import write_json
from stretto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_MIN_MARGIN_S = 5.0
_NUMBER = re.compile(r"[0-9]{1,9}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How a cluster uses Ray."""

    address: str
    """Host and port of Ray's head."""

    namespace: str
    """The namespace of the cluster's actors, which no other start has."""

    is_started: bool
    """Whether the cluster starts and ends Ray, instead of joining one that runs."""

    temp: str = ""
    """Ray's folder for sockets and logs, if the cluster starts it; its path is short,
    because paths of sockets have a limit."""

    token: str = ""
    """File of Ray's token; empty: Ray has none, and the user insists."""

    is_loopback: bool = False
    """Whether a Ray that runs already is reached at 127.0.0.1 alone."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a cluster was started; the file ``settings.json``."""

    hosts: dict[str, tuple[str, ...]]
    """Names of each host's devices; on Ray, those of this machine alone."""

    policy: str
    memory_bytes: int = 0
    """The memory of each device; 0: unknown."""

    network: str = ""
    """File of the measured network that plans are made for; empty: a published one."""

    collocation: str = ""
    """File of measured pairs of foregrounds and backgrounds; empty: none."""

    watchdog_s: float = 60.0
    heartbeat_s: float = 1.0
    report_every_s: float = 10.0

    address: str = "127.0.0.1"
    """This host's address, at which ranks on other hosts meet its own."""

    shared: str = ""
    """Folder that all hosts share, for jobs' files, logs, profiles and plans; empty:
    the cluster's own."""

    ray: RaySettings | None = None

    has_keeper: bool = True
    """Whether a keeper runs the folder's processes; on Ray, actors run the agents."""

    @property
    def margin_s(self) -> float:
        """Within which a busy host's supervisor ends its ranks after its watchdog."""
        return max(_MIN_MARGIN_S, self.watchdog_s / 6)


@final
class Folders:
    """Paths in a cluster's folder."""

    def __init__(self, root: Path) -> None:
        self.root = self.shared = root
        """The cluster's own folder, and the one that all hosts share."""

        self.settings = root / "settings.json"
        self.socket = root / "coordinator.sock"
        self.coordinator_lock = root / "coordinator.lock"
        self.coordinator_log = root / "coordinator.log"
        self.keeper_lock = root / "keeper.lock"
        self.keeper_log = root / "keeper.log"
        self.gateway_lock = root / "gateway.lock"
        self.gateway_log = root / "gateway.log"
        self.ray_lock = root / "ray.lock"
        self.ray_log = root / "ray.log"
        self.ray_token = root / "ray-token"
        self.hosts_folder = root / "hosts"
        self.found_hosts = root / "hosts.json"
        self.clock = root / "clock.json"
        self.actors_ended = root / "actors-ended"
        """Exists if the gateway has ended all actors, as the cluster went down."""

        self.down = root / "down.json"
        """Exists while the cluster is to be down: nothing is started again."""

        self.starting = root / "starting.lock"
        """Locked while a command starts the cluster."""

        self.ending = root / "ending.lock"
        """Locked while a command ends the cluster."""

    def of_node(self, host: str) -> Folders:
        """Return the folders of a host that an actor of Ray serves."""
        return Folders(self.root / "nodes" / host)

    def hosts(self, settings: Settings) -> dict[str, tuple[str, ...]]:
        """Return the devices of all hosts: the settings', and those found since."""
        others = {name: devices for name, (_, devices) in self.noted_hosts().items()}
        return others | settings.hosts

    def note_hosts(self, found: Mapping[str, tuple[str, Sequence[str]]]) -> None:
        """Write which hosts were found: address and devices by name."""
        rows = {
            name: {"address": address, "devices": list(devices)}
            for name, (address, devices) in found.items()
        }
        write_json(self.found_hosts, rows)

    def noted_hosts(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return what `note_hosts` has written; nothing if it never did."""
        try:
            found = json.loads(self.found_hosts.read_bytes())
        except (OSError, ValueError):
            return {}
        return {n: (r["address"], tuple(r["devices"])) for n, r in found.items()}

    def host(self, name: str) -> Path:
        """Return the folder of an agent."""
        return self.hosts_folder / name

    def agent_lock(self, host: str) -> Path:
        """Return the lock of a host's agent."""
        return self.host(host) / "agent.lock"

    def mark_down(self) -> None:
        """Record that the cluster is to be down.

        Raises:
            ClusterError: not even an empty file can be created.
        """
        try:
            self.down.touch(mode=0o600)
        except OSError as exc:
            raise _unwritable(self.down, exc) from exc

    def attempts(self, host: str) -> Path:
        """Return the folder of a host's attempts."""
        return self.host(host) / "attempts"

    def plans(self, job: str) -> Path:
        """Return the folder of a job's plans."""
        return self.shared / "plans" / job

    def plan(self, job: str, devices: int) -> Path:
        """Return the file of a job's burst plan for a number of devices."""
        return self.plans(job) / f"burst{devices}.json"

    def profile(self, digest: str) -> Path:
        """Return the file of a layer profile, which equal jobs share."""
        return self.shared / "profiles" / f"{digest}.json"

    def files(self, job: str) -> Path:
        """Return the folder of a job's own files."""
        return self.shared / "files" / job

    def logs(self, job: str, attempt: int) -> Path:
        """Return the folder of the ranks' logs."""
        return self.shared / "logs" / job / f"attempt{attempt}"

    def last_job_number(self) -> int:
        """Return the largest number of a job that has left files here; 0 without one.

        A store that was moved away leaves them, and no other job may find them.
        """
        names = [
            entry.name
            for kind in ("logs", "files", "plans")
            for entry in _entries(self.shared / kind)
        ]
        ends = [name.rpartition("-")[2] for name in names]
        return max((int(end) for end in ends if _NUMBER.fullmatch(end)), default=0)

    def check_access(self) -> None:
        """Require that this user may use what is in the folder, if it exists.

        Raises:
            ClusterError: it may not.
        """
        try:
            os.listdir(self.root)  # noqa: PTH208 - the cheapest test of all rights
            self.settings.exists()
        except PermissionError as exc:
            raise ClusterError(
                f"the cluster's folder {self.root} is another user's: give another "
                f"with --folder or {variable_names.CLUSTER_DIR}"
            ) from exc
        except OSError:
            return  # missing, or not a folder: what uses it says so

    def create(self) -> None:
        """Create the folder.

        Raises:
            ClusterError: it cannot be created, or others can access it.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.root.lstat()
        except OSError as exc:
            raise ClusterError(
                f"the cluster's folder {self.root} cannot be created ({exc.strerror}): "
                f"give another with --folder or {variable_names.CLUSTER_DIR}"
            ) from exc
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ClusterError(
                f"the cluster's folder {self.root} is not a folder of this user: give "
                f"another with --folder or {variable_names.CLUSTER_DIR}"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ClusterError(
                f"other users can access the cluster's folder {self.root}: run "
                f"`chmod 700 {self.root}`, or give another with --folder"
            )

    def save_settings(self, settings: Settings) -> None:
        """Write the cluster's settings.

        Raises:
            ClusterError: the file cannot be written.
        """
        try:
            write_json(self.settings, asdict(settings))
        except OSError as exc:
            raise _unwritable(self.settings, exc) from exc

    def load_settings(self) -> Settings:
        """Return the cluster's settings.

        Raises:
            ClusterError: no cluster was started here.
        """
        try:
            settings = settings_of(json.loads(self.settings.read_bytes()))
        except FileNotFoundError as exc:
            raise ClusterError(
                f"no cluster was started in {self.root}: run `stretto cluster start`"
            ) from exc
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ClusterError(
                f"{self.settings} cannot be read ({exc}): run `stretto cluster down`, "
                "then `stretto cluster start` with the options that the cluster had; "
                "it keeps its jobs"
            ) from exc
        if settings.shared:
            self.shared = Path(settings.shared)
        return settings

    def find_settings(self) -> Settings | None:
        """Return the cluster's settings, or ``None`` if they cannot be read."""
        try:
            return self.load_settings()
        except ClusterError:
            return None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _unwritable(path: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"{path}: cannot be written: {error.strerror}: free disk space, or give "
        f"another folder with --folder or {variable_names.CLUSTER_DIR}"
    )


def settings_of(plain: Mapping[str, Any]) -> Settings:
    """Return settings from plain JSON.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: a field is missing, unknown or
            invalid.
    """
    found = dict(plain)
    hosts = {name: tuple(names) for name, names in found.pop("hosts").items()}
    ray = found.pop("ray", None)
    return Settings(
        hosts=hosts, ray=None if ray is None else RaySettings(**ray), **found
    )


def local_path(path: str) -> Path:
    """Return a path of JSON, which is UTF-8, as this process's locale names it."""
    return Path(os.fsdecode(path.encode(errors="surrogateescape")))


def default_root() -> Path:
    """Return the folder that the environment names, or the user's own."""
    named = os.environ.get(variable_names.CLUSTER_DIR)
    if named:
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "stretto" / "cluster"
