"""``stretto cluster submit | list | show | logs | stop | drain | events``."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stretto.cli._cluster_options import as_json, in_folder, json_text, put
from stretto.cli._tables import aligned
from stretto.cli._values import Whole
from stretto.cluster import engine_local
from stretto.cluster.folders import local_path
from stretto.cluster.job_files import read_job
from stretto.cluster.views import BATCH_OPTIMAL, DATA_PARALLEL, WEAK
from stretto.errors import SpecError
from stretto.schema import codec
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.cluster.folders import Folders

_POLL_S = 0.2

_PLANS = {
    DATA_PARALLEL: "data parallel",
    WEAK: "data parallel, a batch that grows with the devices",
    BATCH_OPTIMAL: "data parallel, the batch that reaches the target soonest",
}
_CHUNK_BYTES = 1 << 20
_ENDED = ("done", "failed", "stopped")
_MAX_SEQ = 2**63 - 1


@click.command(name="submit")
@click.argument("files", metavar="JOB.json...", nargs=-1, required=True)
@in_folder
@as_json
def submit_command(files: tuple[str, ...], folders: Folders, is_json: bool) -> None:
    """Submit jobs; print their ids, one a line.

    JOB.json describes a job: its command, its folder, how many devices it can use. A
    relative folder in it begins at the file's own.
    """
    # All files are checked before the first job is submitted.
    specs = [(file, read_job(Path(file))) for file in files]
    found: list[dict[str, Any]] = []
    try:
        for file, spec in specs:
            answer = engine_local.ask(
                folders,
                {
                    "do": "submit",
                    "spec": codec.encode(spec).decode(),
                    "source": file,
                    "user": _user(),
                },
            )
            found.append({"job": answer["job"], "file": file})
            if not is_json:
                click.echo(answer["job"])
    finally:  # the cluster may refuse one after others were submitted
        if is_json and found:
            put({"jobs": found})


def _user() -> str:
    """Return the user's name; in some containers there is a number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


@click.command(name="list")
@click.option(
    "--all", "shows_all", is_flag=True, help="Also list jobs that have ended."
)
@in_folder
@as_json
def list_command(shows_all: bool, folders: Folders, is_json: bool) -> None:
    """List the jobs that wait or run."""
    rows = engine_local.ask(folders, {"do": "list"})["jobs"]
    if not shows_all:
        rows = [row for row in rows if row["state"] not in _ENDED]
    if is_json:
        put({"jobs": rows})
        return
    if not rows:
        click.echo("no jobs" if shows_all else "no jobs wait or run; --all lists all")
        return
    table = [("ID", "NAME", "ROLE", "STATE", "DEVICES", "ATTEMPT", "STEP", "WHY")]
    table += [
        (
            row["job"],
            row["name"],
            row["role"],
            row["state"],
            str(len(row["devices"])) if row["devices"] else "-",
            str(row["attempt"]),
            "-" if row["step"] is None else str(row["step"]),
            row["why"].partition("\n")[0],
        )
        for row in rows
    ]
    click.echo(aligned(table, left=range(8)))


def _echo_table(table: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        click.echo(line.rstrip())


@click.command(name="show")
@click.argument("job")
@in_folder
@as_json
def show_command(job: str, folders: Folders, is_json: bool) -> None:
    """Show a job: where it runs, how fast, and why it waits."""
    found = engine_local.ask(folders, {"do": "show", "job": job})
    if is_json:
        put(found)
        return
    click.echo(f"{found['job']}  {found['name']}  {found['role']}  {found['state']}")
    for label, value in _details(found):
        click.echo(f"  {label + ':':<11} {value}")


def _details(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if found["why"]:
        label = "waits" if found["state"] == "waiting" else "because"
        yield label, found["why"]
    if found["devices"]:
        yield (
            "devices",
            ", ".join(f"{host}:{index}" for host, index in found["devices"]),
        )
        yield "plan", _PLANS.get(found["method"], found["method"])
    yield "attempt", f"{found['attempt']}, {found['failures']} failed"
    if found["code"] is not None:
        yield "exit status", str(found["code"])
    progress = found["progress"]
    if progress.get("step") is not None:
        text = str(progress["step"])
        if progress.get("step_s"):
            text += f", {format_s(progress['step_s'])} each"
        if found["predicted_step_s"]:
            text += f" ({format_s(found['predicted_step_s'])} predicted)"
        if progress.get("samples_per_s"):
            text += f", {progress['samples_per_s']:.4g} samples/s"
        if progress.get("idle_s"):
            text += f"; none for {format_s(progress['idle_s'])}: it may hang"
        yield "step", text
    if replanned := found["replanned"]:
        yield "replanned", f"at step {replanned.get('step')}, {replanned.get('why')}"
    yield "command", _command_text(found["command"])
    yield "logs", found["logs"]


def _command_text(command: Sequence[str]) -> str:
    """Return a command on one line, as a shell would read it."""
    words = shlex.join(command)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


@click.command(name="logs")
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended.")
@click.option(
    "--rank",
    type=Whole(min=0),
    default=0,
    show_default=True,
    help="Rank whose output is printed.",
)
@click.option(
    "--attempt",
    type=Whole(min=1),
    help="Attempt whose output is printed.  [default: the last]",
)
@in_folder
@as_json
def logs_command(
    job: str,
    follow: bool,
    rank: int,
    attempt: int | None,
    folders: Folders,
    is_json: bool,
) -> None:
    """Print what a rank of a job wrote.

    With --json it prints one object per line.
    """
    found = engine_local.ask(folders, {"do": "show", "job": job})
    job, number = found["job"], attempt or found["attempt"]
    all_logs = local_path(found["logs"]).parent
    log = _Log(all_logs / f"attempt{number}", rank, number, is_json=is_json)
    while True:
        is_later = found["attempt"] > number
        is_over = is_later or found["state"] in _ENDED
        # What was written before the end is read after it.
        log.copy(is_last=is_over or not follow)
        if is_later and follow and attempt is None:
            number += 1
            log = _Log(all_logs / f"attempt{number}", rank, number, is_json=is_json)
            continue
        if is_over or not follow:
            break
        time.sleep(_POLL_S)
        found = engine_local.ask(folders, {"do": "show", "job": job})
    if not number:
        why = f", {found['why']}" if found["why"] else ""
        raise SpecError(f"{job}: has not started; it is {found['state']}{why}")
    if not log.exists:
        raise SpecError(
            f"{job}: rank {rank} of attempt {number} has no log ({log.path}); the job "
            f"is {found['state']}"
        )


class _Log:
    """A log that is printed as it grows, with JSON line by line."""

    def __init__(self, folder: Path, rank: int, attempt: int, *, is_json: bool) -> None:
        self.path = folder / f"rank{rank}.log"
        self._rank, self._attempt, self._is_json = rank, attempt, is_json
        self._read_bytes, self._rest = 0, b""

    @property
    def exists(self) -> bool:
        """Whether the rank has started."""
        return self.path.exists()

    def copy(self, *, is_last: bool) -> None:
        """Print what is new."""
        if not self.exists:
            return
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            while piece := file.read(_CHUNK_BYTES):
                self._read_bytes += len(piece)
                self._put(piece)
        if is_last and self._rest:
            self._put(b"\n")

    def _put(self, piece: bytes) -> None:
        if not self._is_json:
            click.echo(piece, nl=False)
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        row = {"rank": self._rank, "attempt": self._attempt}
        texts = [
            json.dumps(row | {"line": line.decode(errors="replace")}) + "\n"
            for line in lines
        ]
        if texts:  # at once: each write is flushed
            click.echo("".join(texts), nl=False)


@click.command(name="stop")
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@in_folder
@as_json
def stop_command(jobs: tuple[str, ...], folders: Folders, is_json: bool) -> None:
    """Stop jobs: signal their ranks, and kill them after their grace."""
    # All names are checked before the first job is stopped.
    named = [engine_local.ask(folders, {"do": "show", "job": job}) for job in jobs]
    found: list[str] = []
    ended: dict[str, str] = {}
    try:
        for job in dict.fromkeys(row["job"] for row in named):
            message = {"do": "stop", "job": job, "user": _user()}
            # A coordinator of an earlier release does not say it.
            if state := engine_local.ask(folders, message).get("ended"):
                ended[job] = state
            else:
                found.append(job)
    finally:  # the cluster may refuse one after others were stopped
        if is_json and (found or ended):
            put({"stopping": found, "ended": list(ended)})
        elif not is_json:
            if found:
                click.echo(f"stopping {', '.join(found)}")
            for job, state in ended.items():
                click.echo(f"{job} has ended already: {state}")


@click.command(name="drain")
@click.argument("host")
@click.option("--undo", is_flag=True, help="Use the host again.")
@in_folder
@as_json
def drain_command(host: str, undo: bool, folders: Folders, is_json: bool) -> None:
    """Move a host's jobs elsewhere, and start nothing new there."""
    message = {"do": "drain", "host": host, "open": undo, "user": _user()}
    engine_local.ask(folders, message)
    if is_json:
        put({"host": host, "drained": not undo})
    else:
        click.echo(f"{host} is {'used again' if undo else 'drained'}")


@click.command(name="events")
@click.option(
    "--since",
    type=Whole(min=0, max=_MAX_SEQ),
    default=0,
    show_default=True,
    metavar="SEQ",
    help="Only events after this number.",
)
@click.option("--job", help="Only a job's.")
@click.option("-f", "--follow", is_flag=True, help="Continue until interrupted.")
@in_folder
@as_json
def events_command(
    since: int, job: str | None, follow: bool, folders: Folders, is_json: bool
) -> None:
    """Print what has happened.

    With --json it prints one object per line.
    """
    while True:
        message = {"do": "events", "since": since, "job": job}
        rows = engine_local.ask(folders, message)["events"]
        for row in rows:
            since = row["seq"]
            click.echo(json_text(row) if is_json else _event_line(row))
        if not follow and not rows:
            return
        if not rows:
            time.sleep(_POLL_S)


def _event_line(row: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at_s"]))
    who = f"{row['job']}.{row['attempt']}" if row["attempt"] else row["job"]
    shown = {k: v for k, v in row["data"].items() if k not in ("spec", "speeds")}
    words = [str(row["seq"]), when, row["kind"], who, row["host"]]
    text = "  ".join(word for word in words if word)
    return f"{text}  {json.dumps(shown)}" if shown else text
