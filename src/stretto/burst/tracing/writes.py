"""A forward's writes into arguments and buffers, and errors of those not permitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from stretto.burst.hooks import HOOKS, HOOKS_OF_ALL
from stretto.burst.tracing.records import Ref
from stretto.burst.tracing.replaced import is_torchs_forward
from stretto.burst.tracing.torch_modules import BatchNorm
from stretto.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stretto.burst.tracing.records import Record


def write_error(place: str, what: str, record: Record | None = None) -> str:
    """Return the error of a forward that writes into a parameter or buffer."""
    given = (record.args, record.kwargs) if record is not None else ()
    why, also = "", ""
    if any(isinstance(one, Ref) for one in pytree.tree_leaves(given)):
        why = ", and what is computed from samples would differ between them"
        also = ", or use a torch.nn module that does"
    return (
        f"{place}: writes into the parameter or buffer {what} in forward, which only "
        f"ranks that run this layer would do{why}. Update it in the training loop, "
        f"between steps and on all ranks{also}"
    )


def written_argument(record: Record, args: Any, kwargs: Any, target: Tensor) -> int:
    """Return the position of the argument into which an operation writes.

    A first argument that was given by its name gets a position: functions of
    ``torch.nn.init`` name it themselves.
    """
    positions = [i for i, value in enumerate(args) if value is target]
    if positions:
        return positions[0]
    name = next((name for name, value in kwargs.items() if value is target), None)
    if name in _FIRST and not args and not record.draws:
        others = dict(record.kwargs)
        record.args, record.kwargs = (others.pop(name),), others
        return 0
    where = "a tensor among its arguments" if name is None else f"the tensor {name}="
    raise SpecError(
        f"{record.place}: writes into {where}: write it as an operation that gives a "
        "new tensor"
    )


_FIRST = ("input", "tensor")
"""Names of the argument that functions of torch write into, their first one."""


def is_torchs(module: nn.Module) -> bool:
    """Return whether all code of a module is torch's, which writes into no other."""
    of_all = [hook for kind in HOOKS for hook in HOOKS_OF_ALL[kind].values()]
    if not all(getattr(hook, "is_stretto", False) for hook in of_all):
        return False
    return all(
        type(part).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(part)
        and is_torchs_forward(type(part).forward)
        and not any(vars(part)[kind] for kind in HOOKS)
        for part in module.modules()
    )


def buffers_of(module: nn.Module) -> list[tuple[str, Tensor, nn.Module]]:
    """Return the buffers of a module and its parts, with their names and owners."""
    return [
        (name, buffer, part)
        for part in module.modules()
        for name, buffer in part._buffers.items()  # noqa: SLF001
        if buffer is not None
    ]


def require_known_state(owner: nn.Module, name: str, place: str) -> None:
    """Require that only norms and parametrizations change buffers in forward."""
    if isinstance(owner, BatchNorm):
        return
    kind = type(owner).__module__
    if kind.startswith("torch.nn.utils.param") or hasattr(owner, f"{name}_orig"):
        return
    if hasattr(owner, f"{name.rpartition('_')[0]}_orig"):
        return  # torch.nn.utils.spectral_norm keeps its vectors so
    way = "Update it outside of the model"
    if getattr(owner, "track_running_stats", False):
        way = "Pass track_running_stats=False, or update it outside of the model"
    raise SpecError(
        f"{place}: {type(owner).__name__} writes into its buffer {name!r} in forward: "
        f"ranks would differ in it, as each runs other layers and samples. {way}"
    )
