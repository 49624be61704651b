"""Run a command in a lab: prerequisites, fallback, waiting, stopping."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import step_counts, variable_names
from stretto.errors import CommandNotFound, LabError, SpecError
from stretto.lab.faults import Fault
from stretto.lab.ports import free_port
from stretto.lab.spec import TIMEOUT_STATUS, LabJob, LabSpec, Mode, shared_environment
from stretto.units import format_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
"""Programs that build the network, and the packages that contain them."""

_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
_NAMESPACE_PORT = 29500
_PACING_FOLDER = Path(__file__).parent / "pacing"
_STOP_S = 30.0


def run_lab(
    spec: LabSpec,
    command: Sequence[str],
    *,
    mode: Mode | str = Mode.AUTO,
    timeout_s: float | None = None,
    logs: str | os.PathLike[str] | None = None,
    grace_s: float = 10.0,
    faults: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    announce: Callable[[str], None] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> int:
    """Run ``command`` on every rank of an emulated cluster; return the exit status.

    The status is 0 when every rank ended with 0. Otherwise it is that of the first rank
    that failed (128 + signal if a signal killed it), or 124 when the time limit ended
    the run. Nothing of the lab remains afterward, also when an exception leaves this
    function or this process is killed.

    Args:
        spec: The cluster.
        command: Program and arguments, the same for all ranks. Ranks read their numbers
            from the variables that torchrun sets.
        mode: Namespaces, paced, or auto: namespaces if they are available.
        timeout_s: When to stop all ranks; None: never.
        logs: Folder for ``rank0.log``, ``rank1.log``, ...; None: logs are not kept.
        grace_s: How long the other ranks may continue after a rank has failed, so that
            each can report what it saw.
        faults: What to break and when, such as ``kill host1 at step 40``, see
            `stretto.lab.faults`. Then the end of a rank does not end the others, and
            the status is that of the first rank that failed without being hit.
        env: The ranks' environment, to which the lab adds its own variables; None:
            this process's.
        announce: Receives the lab's own messages, such as the failure of a rank with
            the end of its log; None: standard error.
        stdout: Descriptor for rank 0's standard output; None: this process's.
        stderr: The same for rank 0's standard error.

    Raises:
        SpecError: an argument breaks a rule.
        CommandNotFound: there is no such program.
        LabError: this machine does not support a lab of this mode.
    """
    mode = Mode(mode)
    say = announce or _announce
    if timeout_s is not None and not timeout_s > 0:
        raise SpecError(f"timeout_s must be > 0, got {timeout_s}")
    if not grace_s >= 0:
        raise SpecError(f"grace_s must be >= 0, got {grace_s}")
    rank_env = shared_environment(
        os.environ if env is None else env,
        num_ranks=spec.num_ranks,
        num_cores=len(os.sched_getaffinity(0)),
    )
    _check_command(command, rank_env["PATH"])
    for text in faults:
        Fault.of(text).check(spec, mode)
    with _step_counts(spec, rank_env, faults) as steps:
        return _run(
            spec,
            command,
            mode=mode,
            timeout_s=timeout_s,
            logs=logs,
            grace_s=grace_s,
            faults=list(faults),
            steps=steps,
            rank_env=rank_env,
            say=say,
            output=(stdout, stderr),
        )


@contextlib.contextmanager
def _step_counts(
    spec: LabSpec, rank_env: dict[str, str], faults: Sequence[str]
) -> Iterator[str | None]:
    """Let ranks count their steps, if there are faults that may name one."""
    if not faults:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="stretto-lab-") as folder:
        path = Path(folder, "steps")
        step_counts.create(path, spec.num_ranks)
        rank_env[variable_names.STEP_COUNTS] = str(path)
        yield str(path)


def _run(
    spec: LabSpec,
    command: Sequence[str],
    *,
    mode: Mode,
    timeout_s: float | None,
    logs: str | os.PathLike[str] | None,
    grace_s: float,
    faults: list[str],
    steps: str | None,
    rank_env: dict[str, str],
    say: Callable[[str], None],
    output: tuple[int | None, int | None],
) -> int:
    stdout, stderr = output
    job = LabJob(
        **{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)},
        mode=Mode.NAMESPACES.value,
        command=list(command),
        env=rank_env,
        tools_env=_tools_env(),
        master_port=_NAMESPACE_PORT,
        timeout_s=timeout_s,
        grace_s=grace_s,
        logs=_prepare_logs(logs),
        parent_pid=os.getpid(),
        faults=faults,
        steps=steps,
    )
    if mode is not Mode.PACED:
        reason = _missing_tools(job.tools_env["PATH"])
        if reason is None:
            outcome = _Run(job, say, stdout, stderr).wait()
            if "status" in outcome:
                return int(outcome["status"])
            reason = str(outcome["unavailable"])
        if mode is Mode.NAMESPACES:
            raise LabError(
                "this system provides no network namespaces to build a lab from: "
                f"{reason}. Run it as root or where user namespaces are allowed, or "
                "use --mode paced (a cap per connection, none per link)"
            )
        say(f"no network namespaces here: {reason}")
    for text in faults:
        Fault.of(text).check(spec, Mode.PACED)
    say(_describe_paced(spec))
    paced_env = dict(rank_env)
    if spec.flow_bytes_per_s is not None:
        paced_env[variable_names.LAB_PACING_BYTES_PER_S] = (
            f"{spec.flow_bytes_per_s:.0f}"
        )
        paths = [str(_PACING_FOLDER), rank_env.get("PYTHONPATH", "")]
        paced_env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    job = dataclasses.replace(
        job, mode=Mode.PACED.value, env=paced_env, master_port=free_port()
    )
    return int(_Run(job, say, stdout, stderr).wait()["status"])


def _announce(text: str) -> None:
    sys.stderr.write(f"stretto lab: {text}\n")
    sys.stderr.flush()


def _describe_paced(spec: LabSpec) -> str:
    if spec.flow_bytes_per_s is None:
        limits = "nothing is capped, because no flow rate was given"
    else:
        limits = (
            f"each TCP connection is capped at {format_rate(spec.flow_bytes_per_s)}"
        )
    return (
        f"paced mode: all {spec.num_ranks} ranks share the loopback interface; "
        f"{limits} (Python ranks only), and the link rate of "
        f"{format_rate(spec.link_bytes_per_s)} is not emulated"
    )


def _check_command(command: Sequence[str], path: str) -> None:
    if not command:
        raise SpecError("a lab needs a command to run, got none")
    if shutil.which(command[0], path=path) is None:
        raise CommandNotFound(
            f"command {command[0]!r} is missing or cannot be executed; give a path, or "
            "a program on PATH"
        )


def _prepare_logs(logs: str | os.PathLike[str] | None) -> str | None:
    if logs is None:
        return None
    folder = Path(logs).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(
            f"the folder for logs cannot be created: {folder}: {error.strerror}"
        ) from error
    return str(folder)


def _tools_env() -> dict[str, str]:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), _SYSTEM_FOLDERS])
    return {"PATH": path, "LC_ALL": "C"}


def _missing_tools(path: str) -> str | None:
    """Return why the tools cannot build a network, or None if all are installed."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if not missing:
        return None
    packages = sorted({TOOLS[tool] for tool in missing})
    return (
        f"{', '.join(missing)} missing; the full lab needs the packages "
        f"iproute2 and nftables (install {' and '.join(packages)})"
    )


class _Run:
    """One attempt to run a job, with its supervisor."""

    def __init__(
        self,
        job: LabJob,
        say: Callable[[str], None],
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        self._say = say
        self._hard_limit_s = None
        if job.timeout_s is not None:
            # In case the supervisor cannot act: rank 0's reader may have stalled.
            self._hard_limit_s = time.monotonic() + job.timeout_s + _STOP_S
        report_read, report_write = os.pipe()
        self._reports = os.fdopen(report_read, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "stretto.lab.supervisor",
                    str(report_write),
                ],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[report_write],
                # This process passes Ctrl-C on, once.
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(report_write)
        assert self._process.stdin is not None  # noqa: S101  asked for a pipe above
        self._control = self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._write_all(json.dumps(dataclasses.asdict(job)).encode() + b"\n")

    def _write_all(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[self._control.write(view) or 0 :]

    def wait(self) -> dict[str, Any]:
        """Return the last report: ``status`` or ``unavailable``.

        Raises:
            LabError: the supervisor could not start the command, or ended unexpectedly.
        """
        try:
            outcome = self._read_reports()
        except KeyboardInterrupt:
            self._stop(b"INT\n")
            raise
        except BaseException:
            self._stop(b"TERM\n")
            raise
        finally:
            self._close()
        if outcome is None:
            raise LabError(
                "the lab's supervisor ended without a message (exit status "
                f"{self._process.returncode}); run it again"
            )
        if "error" in outcome:
            raise LabError(outcome["error"])
        return outcome

    def _read_reports(self) -> dict[str, Any] | None:
        """Pass on messages until the supervisor ends; return its outcome."""
        outcome = None
        rest = b""
        while True:
            timeout_s = None
            if self._hard_limit_s is not None:
                timeout_s = max(0.0, self._hard_limit_s - time.monotonic())
            if not select.select([self._reports], [], [], timeout_s)[0]:
                return {"status": TIMEOUT_STATUS}
            piece = self._reports.read(65536)
            if not piece:
                return outcome
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                report = json.loads(line)
                if "say" in report:
                    self._say(report["say"])
                else:
                    outcome = report

    def _stop(self, word: bytes) -> None:
        """Request an end and wait for it; a second Ctrl-C does not wait."""
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
            self._write_all(word)
            self._hard_limit_s = time.monotonic() + _STOP_S
            self._read_reports()

    def _close(self) -> None:
        """End whatever is left, by closing the control pipe or by the kernel."""
        with contextlib.suppress(BrokenPipeError):
            self._control.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._reports.close()
