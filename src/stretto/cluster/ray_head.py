"""The process that runs Ray for a cluster: ``python -m stretto.cluster.ray_head ROOT``.

Ray's processes carry the cluster's folder in their environment, so that exactly they
are ended; ``ray stop`` would end every Ray on the machine. Agents and supervisors do
not carry it, and live on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import variable_names
from stretto.cluster import processes
from stretto.cluster.folders import Folders
from stretto.cluster.loop import Loop

if TYPE_CHECKING:
    from stretto.cluster.folders import RaySettings


_OBJECT_STORE_BYTES = 80_000_000
"""Near the smallest that Ray accepts: no data goes through it."""

_GRACE_S = 5.0


def environment(ray: RaySettings) -> dict[str, str]:
    """Return this process's variables, with those that any client of Ray needs."""
    found = {
        key: value
        for key, value in os.environ.items()
        if key != variable_names.CLUSTER_RAY
    }
    found["RAY_USAGE_STATS_ENABLED"] = "0"
    if ray.token:
        found.pop("RAY_AUTH_TOKEN", None)  # it would come before the file
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": ray.token}
    if ray.is_loopback or (ray.is_started and is_loopback(ray.address)):
        # Otherwise Ray replaces the address and listens on all interfaces.
        found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return found


def is_loopback(address: str) -> bool:
    """Return whether nothing outside this host reaches an address."""
    return address.rpartition(":")[0] == "127.0.0.1"


def start_command(ray: RaySettings) -> list[str]:
    """Return the command that runs Ray until it ends."""
    host, _, port = ray.address.rpartition(":")
    return [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head"),
        *("--block", f"--node-ip-address={host}", f"--port={port}"),
        *("--include-dashboard=false", "--include-log-monitor=false"),
        *("--disable-usage-stats", "--num-cpus=0", "--num-gpus=0"),
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={ray.temp}",
    ]


def run(folders: Folders, ray: RaySettings) -> None:
    """Run Ray until it ends or a signal comes; nothing of it is left."""
    mark = str(folders.root)
    # What a killed process of this kind has left.
    processes.kill_marked(variable_names.CLUSTER_RAY, mark)
    Path(ray.temp).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Ray's processes otherwise run at nice 15, and jobs with them; and Ray would end
    # its own processes when a host's memory is nearly full.
    more = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    process = subprocess.Popen(
        start_command(ray),
        stdin=subprocess.DEVNULL,
        env=environment(ray) | more | {variable_names.CLUSTER_RAY: mark},
        start_new_session=True,
    )
    loop = Loop()

    def end() -> None:
        process.terminate()
        loop.call_in(_GRACE_S, loop.stop)

    def look() -> None:
        if process.poll() is not None:
            loop.stop()

    loop.on_signals({signal.SIGTERM: end, signal.SIGINT: end, signal.SIGCHLD: look})
    loop.every(1.0, look)
    look()
    loop.run()
    processes.kill_marked(variable_names.CLUSTER_RAY, mark)
    process.wait()
    if folders.down.exists():
        shutil.rmtree(Path(ray.temp).parent, ignore_errors=True)


def main(folder: str) -> int:
    """Run the Ray of a cluster, unless it runs already."""
    folders = Folders(Path(folder))
    if processes.lock_as_owner(folders.ray_lock) is None or folders.down.exists():
        return 0
    ray = folders.load_settings().ray
    if ray is None or not ray.is_started:
        return 0
    os.umask(0o077)
    run(folders, ray)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
