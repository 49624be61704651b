"""Find what the user's code does with answers about its process and its job.

# Note [Questions about the job]
Forward, a backward or a hook may ask for this process's rank or for their number, from
``torch.distributed`` or from the environment. A burst model computes what one process
would, which gets other answers. So the module that layers are compared with gets these;
if the answers matter, the layers differ from it. Answers that only decide what is
logged don't matter. Only code of the user's gets them, PyTorch's own does not.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import types
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import distributed

from stretto.burst.tracing.freezing import is_users_frame
from stretto.burst.tracing.source_lines import source_line
from stretto.errors import SpecError

if distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ANSWERS = {
    "get_rank": 0,
    "get_node_local_rank": 0,
    "get_world_size": 1,
    "is_initialized": False,
}
"""Results of functions of ``torch.distributed`` in one process."""

_ANSWERS_OF_GROUPS = {"size": 1, "rank": 0}
_ANSWERS_OF_MESHES = {"size": 1, "get_rank": 0, "get_local_rank": 0}
"""The same of methods of process groups and of device meshes."""

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
)

_RANKS = (
    *("RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NODEID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"),
)
_LOCAL_RANKS = (
    *("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MV2_COMM_WORLD_LOCAL_RANK",
)
"""They choose the device, which must stay as it is."""

_SIZES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE"),
    *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
)

_BETWEEN = ("os", "_collections_abc", "collections.abc")
"""Modules through which the environment is read."""


@final
class Questions:
    """The questions that the user's code asks while it is entered.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.found: dict[str, str] = {}
        """The questions, by their lines."""
        names = (*_RANKS, *(_LOCAL_RANKS if device.type == "cpu" else ()))
        self._environment = dict.fromkeys(names, "0") | dict.fromkeys(_SIZES, "1")
        self._others: dict[str, Any] = dict(_ANSWERS)
        self._thread = threading.get_ident()

    def place(self) -> str:
        """Return the lines that asked, with what they asked; or nothing."""
        lines = [f"{line}: reads {what}" for line, what in self.found.items()]
        return " and ".join(lines[:3])

    def answer(self, name: str, real: Any, frame: types.FrameType | None) -> Any:
        """Return what the user's code gets where another answer is real."""
        is_mine = self._thread == threading.get_ident() or (
            threading.get_ident() not in threading._active  # type: ignore[attr-defined]  # noqa: SLF001 - of autograd
        )
        if not is_mine or not is_users_frame(frame, _BETWEEN):
            return real
        given = self._environment.get(name, self._others.get(name))
        if type(given) is type(real) and given != real:
            self.found.setdefault(
                source_line(), f"{_full(name)}, which is {given} in one process"
            )
            return given
        return real

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Answer as in one process."""
        kind: Any = type(os.environ)
        item = kind.__getitem__

        def read(environment: Any, name: Any) -> Any:
            return self.answer(name, item(environment, name), sys._getframe(1))  # noqa: SLF001

        with contextlib.ExitStack() as stack:
            if distributed.is_available() and distributed.is_initialized():
                for name in _ANSWERS:
                    stack.enter_context(
                        _routed(getattr(distributed, name), partial(self._of_job, name))
                    )
                for name, answer in _ANSWERS_OF_MESHES.items():
                    full, of_mesh = f"DeviceMesh.{name}", getattr(DeviceMesh, name)
                    self._others[full] = answer
                    stack.enter_context(_routed(of_mesh, partial(self._of_job, full)))
                for name, answer in _ANSWERS_OF_GROUPS.items():
                    self._others[f"ProcessGroup.{name}"] = answer
                    stack.enter_context(self._method_answered(name))
            kind.__getitem__ = read
            stack.callback(setattr, kind, "__getitem__", item)
            yield

    @contextlib.contextmanager
    def _method_answered(self, name: str) -> Iterator[None]:
        """Answer a method of process groups, which is not Python code."""
        kind: Any = distributed.ProcessGroup
        method = vars(kind)[name]

        def asked(group: Any) -> Any:
            real = method.__get__(group, kind)()
            return self.answer(f"ProcessGroup.{name}", real, sys._getframe(1))  # noqa: SLF001

        setattr(kind, name, asked)
        try:
            yield
        finally:
            setattr(kind, name, method)

    def _of_job(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        # The caller of the function that is routed here.
        return self.answer(name, call(*args, **kwargs), sys._getframe(3))  # noqa: SLF001


def _full(name: str) -> str:
    if name in _ANSWERS:
        return f"torch.distributed.{name}()"
    return f"{name}()" if "." in name else name


@contextlib.contextmanager
def seeds_refused() -> Iterator[None]:
    """Refuse code of the user's that asks for the seed of random numbers."""

    def ask(call: Any, args: Any, kwargs: Any) -> Any:
        if is_users_frame(sys._getframe(3)):  # noqa: SLF001
            raise SpecError(
                f"{source_line()}: reads torch.initial_seed() in the model: layers run "
                "on other ranks, with seeds of their own. Read it outside of the "
                "model, and pass what is made of it as an attribute"
            )
        return call(*args, **kwargs)

    with _routed(torch.initial_seed, ask), _routed(torch.cuda.initial_seed, ask):
        yield


@contextlib.contextmanager
def collectives_refused() -> Iterator[None]:
    """Refuse collectives of the user's code."""

    def refuse(name: str, call: Any, args: Any, kwargs: Any) -> Any:
        if is_users_frame(sys._getframe(3), (_LOGGER,)):  # noqa: SLF001
            raise SpecError(
                f"{source_line()}: calls torch.distributed.{name} in the model: layers "
                "run on some ranks, with samples of others, so the ranks would not "
                "call it together. Call it outside of the model"
            )
        return call(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        if distributed.is_available() and distributed.is_initialized():
            for name in _COLLECTIVES:
                function = inspect.unwrap(getattr(distributed, name))
                stack.enter_context(_routed(function, partial(refuse, name)))
        yield


_LOGGER = "torch.distributed.c10d_logger"
"""The module whose wrapper calls most of the collectives."""


@contextlib.contextmanager
def _routed(function: Any, answer: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Route a function's calls through another, which is given it and the arguments.

    Its code is exchanged rather than the attribute, because programs import functions
    by name.
    """
    if function.__closure__:  # another version of PyTorch wraps it
        yield
        return
    code, key = function.__code__, f"{function.__module__}.{function.__qualname__}"
    original = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    before = _routes.get(key)
    _routes[key] = partial(answer, original)
    consts = _template.__code__.co_consts
    try:
        function.__code__ = _template.__code__.replace(
            co_consts=tuple(key if one == _KEY else one for one in consts)
        )
        yield
    finally:
        function.__code__ = code
        if before is None:
            del _routes[key]
        else:
            _routes[key] = before


_KEY = "<key>"


def _template(*args: Any, **kwargs: Any) -> Any:
    # This code becomes another function's, whose globals are not this module's.
    from stretto.burst.tracing.questions import routed

    return routed("<key>", args, kwargs)


_routes: dict[str, Callable[[Any, Any], Any]] = {}


def routed(key: str, args: Any, kwargs: Any) -> Any:
    """Serve a function whose code is exchanged."""
    return _routes[key](args, kwargs)
