"""Run a script in this process with stretto's DistributedDataParallel.

torchrun starts this as ``python -m stretto._api.script SCRIPT ARGS``.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.nn.parallel
import torch.nn.parallel.distributed
from torch import multiprocessing

from stretto._api.ddp import DistributedDataParallel
from stretto._api.environment import check_interfaces
from stretto.convert import Choices, run_converted
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

CONVERT_VARIABLE = "STRETTO_CONVERT"
"""Set by `stretto run --convert`: scripts for one device are converted first."""


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


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, on stretto's DDP.

    Raises:
        SpecError: There is no such script, or no such network interface.
    """
    if not script.is_file():
        raise SpecError(f"{script}: no such script")
    check_interfaces(os.environ)
    replace_ddp()
    warn_of_spawn()
    _show_log()
    sys.argv = [str(script), *arguments]
    sys.path[0:1] = [str(script.resolve().parent)]
    if os.environ.get(CONVERT_VARIABLE):
        run_converted(script, Choices())
    else:
        runpy.run_path(str(script), run_name="__main__")


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m MODULE ARGUMENTS`` would, on stretto's DDP.

    Raises:
        SpecError: There is no such module or network interface, or the module would
            have to be converted.
    """
    if os.environ.get(CONVERT_VARIABLE):
        raise SpecError("--convert needs the path of a script, not a module (-m)")
    check_interfaces(os.environ)
    replace_ddp()
    warn_of_spawn()
    _show_log()
    sys.argv = [module, *arguments]
    sys.path[0:1] = [str(Path.cwd())]
    try:
        known = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        known = False
    if not known:
        raise SpecError(
            f"-m {module}: no such module: give the name of an importable module"
        )
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _show_log() -> None:
    """Show log lines if the script sets up no logging of its own."""
    logger = logging.getLogger("stretto")
    own = [h for h in logger.handlers if type(h).__module__ != "stretto"]
    if not own and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("stretto: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def main() -> None:
    """Run ``python -m stretto._api.script SCRIPT ARGS``."""
    script, *arguments = sys.argv[1:]
    try:
        if script == "-m":
            run_module(arguments[0], arguments[1:])
        else:
            run_script(Path(script), arguments)
    except StrettoError as error:
        sys.stderr.write(f"stretto: error: {error}\n")
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - whatever the script raised
        sys.excepthook(*sys.exc_info())
        _leave(1)


def _leave(status: int) -> NoReturn:
    """End the process with an error's exit status.

    Communication threads may still run, because other ranks end at the same time. An
    interpreter that ends under them occasionally aborts, and a launcher would then
    report that signal instead of the error.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - what an ordinary end would do first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
