"""Uses of PyTorch beyond its public interface.

# Note [DDP's own set-up]
`DistributedDataParallel._ddp_init_helper` asks ``dist`` for a bucket assignment and
builds a ``dist.Reducer`` from it, with arguments that change from release to release.
Instead of writing that call again per release, this module runs the same function with
its own ``dist`` in the function's globals, which answers those two requests and
forwards all others. Nothing outside that one call sees it.

# Note [A communicator per bucket on Gloo]
PowerSGD sends a bucket in three all-reduces, each started by a callback of the previous
one. Gloo's callbacks run on its own threads, so on one communicator the collectives of
two buckets would start in an order that differs between ranks. On Gloo each bucket
therefore has its own communicator, where only its own chain runs. On NCCL callbacks run
on the launching thread, in launch order, and each bucket uses its plan's lane.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto._version import TORCH_VERSIONS
from stretto.errors import PlanMismatch
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from stretto.runtime.ranks import Ranks

_F = TypeVar("_F", bound="Callable[..., Any]")

_log = get_logger(__name__)

WHOLE_COMPILE = (
    "%s: the whole model is compiled: PyTorch computes its backward in few pieces, and "
    "all gradients of a piece become ready at its end, so a plan has little to "
    "overlap with. Compile each block (`for block in model.blocks: block.compile()`) "
    "before the model is wrapped."
)


def without_dynamo(function: _F) -> _F:
    """Keep TorchDynamo out of a function called below compiled code.

    Dynamo inspects every frame there, and can't inspect a process group. Where forward
    or the whole step is compiled, backward and its callbacks are below it too. A frame
    that Dynamo compiles is compiled again when what it reads has changed, which a
    program can forbid (``torch.compiler.set_stance("fail_on_recompile")``). Unlike
    ``torch.compiler.disable`` this imports nothing until the function is called.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("_F", disable(function))


def is_tracing() -> bool:
    """Return whether TorchDynamo is compiling code of this thread."""
    return torch._guards.CompileContext.try_get() is not None  # noqa: SLF001


def sparse_coo_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Return a sparse tensor of entries that need no check.

    ``torch.sparse_coo_tensor`` warns of missing checks, in some versions also if they
    are declined, which is an error in a thread of ours under ``-W error``.
    """
    make: Any = torch.ops.aten._sparse_coo_tensor_unsafe  # noqa: SLF001
    return cast("torch.Tensor", make(indices, values, shape))


def with_arguments_of(base: Callable[..., Any]) -> Callable[[_F], _F]:
    """Show ``base``'s arguments in a constructor that passes ``*args, **kwargs`` on.

    Programs read DDP's signature to see which arguments it has, and leave others out.
    """

    def shown(function: _F) -> _F:
        named = {
            name: parameter
            for source in (base, function)
            for name, parameter in inspect.signature(source).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        # Their own are keyword-only, which come last.
        rows = sorted(named.values(), key=lambda parameter: parameter.kind)
        cast("Any", function).__signature__ = inspect.Signature(rows)
        return function

    return shown


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments given to DDP, by name.

    Raises:
        TypeError: DDP has no such argument.
    """
    signature = inspect.signature(TorchDDP.__init__)
    try:
        return signature.bind_partial(None, module, *args, **kwargs).arguments
    except TypeError as exc:
        raise TypeError(f"DistributedDataParallel.__init__() {exc}") from None


def process_group_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dist.ProcessGroup:
    """Return the process group that DDP will use with these arguments.

    Raises:
        TypeError: this rank is in no such group.
    """
    arguments = arguments_of(module, args, kwargs)
    given = arguments.get("process_group")
    mesh = arguments.get("device_mesh")
    if isinstance(given, int):
        if given != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(f"process_group must be a process group, got {given!r}")
        raise TypeError(
            "process_group is not a group: this rank is not among the ranks that "
            "torch.distributed.new_group was given"
        )
    if given is not None:
        return cast("dist.ProcessGroup", given)
    if mesh is not None and mesh.ndim == 1:
        return cast("dist.ProcessGroup", mesh.get_group(mesh_dim=0))
    return dist.distributed_c10d._get_default_group()  # noqa: SLF001


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend for tensors on a device: ``gloo``, ``nccl``, ...

    A group whose class is a program's own has no backend that plans know: lanes would
    pass by its collectives.
    """
    if type(group) is not dist.ProcessGroup:
        return type(group).__name__
    name: str = group._get_backend(device).name()  # noqa: SLF001
    return name


def is_compiled_whole(module: nn.Module) -> bool:
    """Return whether the whole module was compiled, rather than its blocks."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def warn_of_whole_compile(module: nn.Module, ranks: Ranks, *, around: bool) -> None:
    """Warn on the first rank that a plan has little to overlap with.

    ``around``: DDP's own forward is compiled, and the module's with it.
    """
    if ranks.rank == 0 and ranks.size > 1 and (around or is_compiled_whole(module)):
        _log.warning(WHOLE_COMPILE, ranks.name(0))


_NEEDED = {"dist", "_compute_bucket_assignment_by_size", "Reducer"}


@final
class _Dist:
    """``torch.distributed``, except for the two names that set a Reducer's buckets."""

    def __init__(
        self,
        model: TorchDDP,
        indices: Sequence[Sequence[int]] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._model = model
        self._indices = None if indices is None else [list(b) for b in indices]
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _compute_bucket_assignment_by_size(
        self, parameters: list[torch.Tensor], *limits: Any
    ) -> tuple[list[list[int]], list[int]]:
        if self._indices is None:
            rule: Any = getattr(dist, "_compute_bucket_assignment_by_size")  # noqa: B009
            by_rule: tuple[list[list[int]], list[int]] = rule(parameters, *limits)
            return by_rule
        # DDP reverses both lists, because it assigns in order of declaration.
        sizes = [
            sum(parameters[i].numel() * parameters[i].element_size() for i in bucket)
            for bucket in self._indices
        ]
        return self._indices[::-1], sizes[::-1]

    def Reducer(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        mine, base = self._group, self._model.process_group
        swapped = [mine if value is base else value for value in args]
        named = {k: mine if value is base else value for k, value in kwargs.items()}
        if not any(v is mine for v in (*swapped, *named.values())):
            raise _unsupported("Reducer takes no process group")
        reducer: Any = getattr(dist, "Reducer")  # noqa: B009
        return reducer(*swapped, **named)


def build_reducer(
    model: TorchDDP,
    indices: Sequence[Sequence[int]] | None,
    group: dist.ProcessGroup,
    arguments: tuple[Any, ...],
) -> None:
    """Give ``model`` a Reducer with exactly these buckets, in this order.

    ``indices`` are positions in DDP's parameter list, ``None`` for the buckets of DDP's
    rule; ``group`` is the Reducer's process group; ``arguments`` are those of
    ``_ddp_init_helper``.

    Raises:
        PlanMismatch: this version of PyTorch builds its Reducer differently.
    """
    helper: Any = TorchDDP._ddp_init_helper  # noqa: SLF001
    code = helper.__code__
    if helper.__closure__ is not None or not _NEEDED.issubset(code.co_names):
        raise _unsupported("DDP sets its Reducer up in another way")
    borrowed = types.FunctionType(
        code,
        {**helper.__globals__, "dist": _Dist(model, indices, group)},
        helper.__name__,
        helper.__defaults__,
    )
    borrowed(model, *arguments)
    keep_group(model)


def keep_group(model: TorchDDP) -> None:
    """Keep a group's Python object until the Reducer and Logger are gone.

    Python destroys Gloo's group without the interpreter's lock. A Reducer that drops
    the last reference destroys it with the lock held and joins the group's workers,
    which may wait for the lock: a deadlock (docs/known-issues-of-torch.md).
    """
    group: dist.ProcessGroup = model.process_group
    if type(group) is dist.ProcessGroup:  # a class of Python's own may know the model
        for owner in (model.reducer, model.logger):
            weakref.finalize(owner, _drop, group).atexit = False


def _drop(group: dist.ProcessGroup) -> None:
    """Drop the reference to ``group``."""


_LOGGED_ITERATIONS = 10
"""First iterations of a Reducer whose times DDP logs; then every hundredth."""


def pass_logged_iterations(model: TorchDDP) -> None:
    """Count iterations on a new Reducer, so that the next ones read no events.

    Reading one ends the capture of a CUDA graph. A program takes eleven steps before it
    captures one, as PyTorch asks for, but a plan may have replaced the Reducer since.
    """
    logger: Any = model.logger
    logged = logger._get_ddp_logging_data().ints_map  # noqa: SLF001
    if logged.get("iteration", 0) < _LOGGED_ITERATIONS and not model.static_graph:
        for _ in range(_LOGGED_ITERATIONS + 1):
            model.reducer.prepare_for_forward()


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what this thread launches."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _unsupported(what: str) -> PlanMismatch:
    return PlanMismatch(
        f"plans are not supported with PyTorch {torch.__version__}: {what}, unlike "
        f"{TORCH_VERSIONS}. Install one of these, or pass plan=None for plain DDP."
    )


_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
"""Attributes in which PowerSGD keeps tensors by bucket."""


def on_lanes(
    hook: Callable[..., Any], groups_of: Callable[[], tuple[object, Sequence[Any]]]
) -> Callable[..., Any]:
    """Return the hook, with each bucket's collectives on the bucket's own group.

    ``groups_of`` returns the owner of the buckets and a group for each bucket, or one
    for all. When the owner changes, tensors that PowerSGD keeps for the old buckets are
    dropped. A state without ``process_group`` is replaced by the group, as the default
    hooks expect.
    """
    seen: list[object] = []

    @functools.wraps(hook)
    def run(state: Any, bucket: Any) -> Any:
        plan, groups = groups_of()
        if not seen or seen[0] is not plan:
            seen[:] = [plan]
            for name in _MEMORIES:
                if hasattr(state, name):
                    getattr(state, name).clear()
        group = groups[0 if len(groups) == 1 else bucket.index()]
        if not hasattr(state, "process_group"):
            return hook(group, bucket)
        state.process_group = group
        return hook(state, bucket)

    return run
