"""Load a user's model by the name of the function that makes it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

_FORM = "PATH.py:FUNCTION or MODULE:FUNCTION"


def made_by(
    name: str,
) -> tuple[
    nn.Module,
    tuple[tuple[Any, ...], dict[str, Any]],
    Callable[..., Any] | None,
    Callable[..., Any] | None,
]:
    """Return model, example inputs, loss and what makes an optimizer (or None).

    Example inputs are given as positional arguments and keyword arguments.

    Raises:
        SpecError: the function is missing, or it returns something else.
    """
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise SpecError(f"FACTORY must be {_FORM}, got {name!r}")
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    make = getattr(module, function, None)
    if not callable(make):
        raise SpecError(f"{where} has no function {function!r}")
    _require_no_arguments(name, make)
    made = make()
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        raise SpecError(
            f"{name} must return (model, example_inputs), and may add loss and "
            f"optimizer; it returned {type(made).__name__}"
        )
    model, inputs, loss, optimizer = (*made, None, None)[:4]
    if not isinstance(model, nn.Module) or not isinstance(inputs, (tuple, Mapping)):
        raise SpecError(
            f"{name} must return a torch.nn.Module and its inputs as a tuple, or as a "
            f"dictionary of keyword arguments; it returned {type(model).__name__} and "
            f"{type(inputs).__name__}"
        )
    for what, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None and not callable(value):
            gives = {"loss": "the output to the loss", "optimizer": "parameters to one"}
            raise SpecError(
                f"{name} must return as {what} a function from {gives[what]}, or None; "
                f"it returned {type(value).__name__}"
            )
    given = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
    return model, given, loss, optimizer


def _require_no_arguments(name: str, make: Callable[..., Any]) -> None:
    """Require a function that can be called without arguments.

    Raises:
        SpecError: it needs some.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # of a built-in
        return
    try:
        signature.bind()
    except TypeError as exc:
        raise SpecError(
            f"{name} is called without arguments, but its function needs some ({exc}): "
            "give them default values, or add a function without arguments"
        ) from None


def _file(path: Path) -> Any:
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path}: can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SpecError(
            f"there is no module {name!r} ({error}): FACTORY must be {_FORM}"
        ) from error
