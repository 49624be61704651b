"""Run a script in this process with stretto's DistributedDataParallel.

torchrun starts this as ``python -m stretto.script SCRIPT ARGS``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import io
import itertools
import logging
import os
import pkgutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.nn.parallel
import torch.nn.parallel.distributed
from torch import multiprocessing
from torch.optim.optimizer import register_optimizer_step_post_hook

from stretto import variable_names
from stretto._api.ddp import DistributedDataParallel
from stretto.errors import SpecError, StrettoError
from stretto.logs import LastResort, get_logger
from stretto.main_module import (
    main_file,
    require_script,
    run_file,
    run_named,
    show_error,
)
from stretto.network_interfaces import check_interfaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = get_logger(__name__)


_UNMARKED_STEPS = 3
"""The optimizers' step after which a foreground is expected to mark its steps."""


def replace_ddp() -> None:
    """Replace DDP by stretto's class where scripts and libraries find it.

    `isinstance` checks against DDP still hold, because stretto's class is a subclass.
    Code that imported the class before this call keeps DDP's own.
    """
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]


def warn_of_spawn() -> None:
    """Make ``torch.multiprocessing.spawn`` log a line inside one of several ranks.

    Such a script starts its ranks once in every rank of the launcher; all of them use
    one address, and hang or fail there. A DataLoader starts its workers in another way.
    """
    package: Any = multiprocessing
    spawn = package.spawn

    @functools.wraps(spawn)
    def warn_and_spawn(*args: Any, **kwargs: Any) -> Any:
        ranks, local_rank = (
            os.environ.get("WORLD_SIZE", "1"),
            os.environ.get("LOCAL_RANK"),
        )
        if ranks != "1" and local_rank in (None, "0"):
            _log.warning(
                "the script calls torch.multiprocessing.spawn in each of %s launched "
                "ranks. If that starts its ranks, it will hang: start it with plain "
                "`python`, or remove spawn and read RANK and LOCAL_RANK from the "
                "environment.",
                ranks,
            )
        return spawn(*args, **kwargs)

    package.spawn = warn_and_spawn


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, on stretto's DDP.

    An error that the script does not catch ends the process.

    Raises:
        SpecError: there is no such script, or no such network interface.
        MissingPackage: the script is to be converted, and LibCST is missing.
    """
    path = Path(script)
    require_script(path)
    run = _runner_of(script)
    check_interfaces(os.environ)
    replace_ddp()
    warn_of_spawn()
    _show_log()
    _report_steps()
    _lease()
    _expect_foreground()
    sys.argv = [script, *arguments]
    if pkgutil.get_importer(script) is not None:  # an archive, which contains modules
        sys.path[: _own_entries()] = [main_file(script)]
    else:
        _search_first(path.resolve().parent)
    _end_on_error(run)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m MODULE ARGUMENTS`` would, on stretto's DDP.

    An error that the module does not catch ends the process.

    Raises:
        SpecError: there is no such module or network interface, or the module would
            have to be converted.
    """
    if os.environ.get(variable_names.CONVERT):
        raise SpecError("--convert needs the path of a script, not a module (-m)")
    check_interfaces(os.environ)
    replace_ddp()
    warn_of_spawn()
    _show_log()
    _report_steps()
    _lease()
    _expect_foreground()
    sys.argv = ["-m", *arguments]
    _search_first(Path.cwd())
    try:
        known = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        known = False
    if not known:
        raise SpecError(
            f"-m {module}: no such module: give the name of an importable module"
        )
    _end_on_error(lambda: run_named(module))


def _runner_of(script: str) -> Callable[[], None]:
    """Return what runs a script, converted if that is requested.

    Raises:
        MissingPackage: the script is to be converted, and LibCST is missing.
    """
    if not os.environ.get(variable_names.CONVERT):
        return functools.partial(run_file, script)
    # Imported before the script's folder comes first in the search for modules.
    from stretto.convert import Choices, run_converted

    return functools.partial(run_converted, Path(script), Choices())


def _own_entries() -> int:
    """Return how many entries of ``sys.path`` this program's start has put first."""
    return 0 if sys.flags.safe_path else 1


def _search_first(folder: Path) -> None:
    """Search a program's folder first, unless Python is asked not to (``-P``)."""
    if not sys.flags.safe_path:
        sys.path[: _own_entries()] = [str(folder)]


def _lease() -> None:
    """Make the script a background, if `stretto run --background` says so.

    Raises:
        SpecError: a setting of the background is invalid.
        BackgroundError: the device has a background already.
    """
    if os.environ.get(variable_names.BACKGROUND):
        # Most scripts are no backgrounds.
        from stretto.background.script_leases import lease_script

        lease_script()


def _expect_foreground() -> None:
    """Warn where a foreground's script trains with nothing that marks its steps."""
    if not os.environ.get(variable_names.FOREGROUND):
        return
    # Most scripts are no foregrounds.
    from stretto.background.named_device import warn_of_no_foreground

    steps = itertools.count(1)

    def look(*_: Any) -> None:
        # In a compiled step, the count would be a reason to compile again.
        if not torch.compiler.is_compiling() and next(steps) == _UNMARKED_STEPS:
            warn_of_no_foreground()

    register_optimizer_step_post_hook(look)


def _report_steps() -> None:
    """Count steps for the supervisor that started this process, if there is one."""
    if os.environ.get(variable_names.STEP_COUNTS):
        # Most scripts are not started by a cluster.
        from stretto.background.step_reports import report_steps

        report_steps()


def _show_log() -> None:
    """Show log lines on stderr, if nothing else has been set up for them.

    They do not reach handlers that the script sets up later: its output is its own.
    """
    logger = logging.getLogger("stretto")
    own = [h for h in logger.handlers if not isinstance(h, LastResort)]
    if not own and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("stretto: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def main() -> None:
    """Run ``python -m stretto.script SCRIPT ARGS``."""
    script, *arguments = sys.argv[1:]
    try:
        if script == "-m":
            run_module(arguments[0], arguments[1:])
        else:
            run_script(script, arguments)
    except StrettoError as error:
        sys.stderr.write(f"stretto: error: {error}\n")
        sys.exit(error.exit_code)


def _end_on_error(run: Callable[[], None]) -> None:
    """Run a program; an error that it does not catch ends the process.

    Raises:
        StrettoError: the program raised it; the caller reports it in one line.
    """
    try:
        run()
    except StrettoError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it raised
        show_error(error)
        _leave(1, is_interrupt=isinstance(error, KeyboardInterrupt))


def _leave(status: int, *, is_interrupt: bool = False) -> NoReturn:
    """End the process with an error's exit status, after what Python does at its end.

    An interrupt (Ctrl-C) ends it by its signal, as it ends Python, so that a shell ends
    its loop or script too.

    Threads of the program may still save a checkpoint, so this waits for all that are
    not daemons and for executors, as the interpreter does. stretto's own threads are
    daemons, or end by themselves within seconds.

    The interpreter itself is not finalized. Communication threads may still run,
    because other ranks end at the same time: an interpreter that ends under them
    occasionally aborts, and a launcher would then report that signal instead of the
    error. It also destroys the process group, whose destructor waits for collectives
    that the other ranks may never join.
    """
    threads: Any = threading
    for end in (threads._shutdown, atexit._run_exitfuncs, _flush_files):  # noqa: SLF001
        try:
            end()
        except BaseException:  # noqa: BLE001 - an interrupt, too, ends only this wait
            traceback.print_exc()
    if is_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _flush_files() -> None:
    """Write what open files have buffered, as their destruction would."""
    files = [sys.stdout, sys.stderr]
    for kind in (io.TextIOWrapper, io.BufferedWriter):  # the outer ones first
        # `isinstance` would ask proxies, of which some warn.
        files += [f for f in gc.get_objects() if issubclass(type(f), kind)]
    for file in files:
        with contextlib.suppress(Exception):  # closed, or nothing reads it
            file.flush()


if __name__ == "__main__":
    main()
