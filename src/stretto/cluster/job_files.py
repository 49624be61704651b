"""Job files as people write them, and what this machine can check of them."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from stretto.cluster.folders import local_path
from stretto.cluster.part_spec import base_environment
from stretto.errors import SpecError
from stretto.schema import codec
from stretto.schema.job import DIRECT, Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MAX_BYTES = 4 << 20
"""The channels to the coordinator take longer lines."""


def read_job(path: Path) -> Job:
    """Return the job in a file; a relative folder begins at the file's own.

    Raises:
        SpecError: the file breaks a rule, or its folder or script is missing.
    """
    data = codec.read(path)
    if len(data) > _MAX_BYTES:
        raise SpecError(
            f"{path}: has {len(data)} bytes; a job file has at most {_MAX_BYTES}"
        )
    body = codec.parse(data, str(path))
    if isinstance(body.get("directory"), str) and body["directory"]:
        try:
            body["directory"] = _absolute(path.parent, body["directory"])
            data = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeDecodeError as exc:
            raise SpecError(
                f"{path}: $.directory: its path is not UTF-8: rename a folder"
            ) from exc
        except ValueError:
            pass  # the codec says what is wrong
    job = codec.decode(data, Job, source=str(path))
    check_files(job, source=str(path))
    return job


def check_files(job: Job, *, source: str) -> None:
    """Check that a job's folder and program exist on this machine.

    Raises:
        SpecError: one is missing.
    """
    folder = local_path(job.directory)
    if not _has(folder.is_dir):
        raise SpecError(f"{source}: $.directory: no such folder: {folder}")
    program = os.fsdecode(job.command[0].encode())
    if job.launch == DIRECT:
        search = job.environment.get("PATH", base_environment()["PATH"])
        where = str(folder / program) if "/" in program else program
        if shutil.which(where, path=search) is None:
            raise SpecError(
                f"{source}: $.command[0]: {program!r} is missing or cannot be "
                "executed: give a path, or a program on PATH"
            )
    elif program == "-m":
        if len(job.command) == 1:
            raise SpecError(f"{source}: $.command: names no module after -m")
    elif not _has((folder / program).is_file):
        raise SpecError(f"{source}: $.command[0]: no such script: {folder / program}")
    if job.burst is not None:
        _check_burst(job, folder, source)


def _absolute(base: Path, directory: str) -> str:
    """Return the absolute path of a folder that a job file names, as text of UTF-8.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        ValueError: it has characters that no path can have.
    """
    path = base / local_path(directory)
    try:
        path = path.resolve()
    except (OSError, RuntimeError):  # a circle of links
        path = path.absolute()
    return os.fsencode(path).decode()


def _has(look: Callable[[], bool]) -> bool:
    """Return what a look at a path says; a path that no file can have has none."""
    try:
        return look()
    except (OSError, ValueError):
        return False


def _check_burst(job: Job, folder: Path, source: str) -> None:
    if job.burst is None:
        return
    factory = job.burst.factory.partition(":")[0]
    named = {"factory": factory, "profile": job.burst.profile}
    for key, name in named.items():
        if name is not None and not _has((folder / local_path(name)).is_file):
            raise SpecError(f"{source}: $.burst.{key}: no such file: {folder / name}")
