"""Defer an optimizer's step to each bucket's first use in the next forward.

# Note [Hooks of every optimizer]
Global hooks of ``torch.optim`` find an optimizer without the user's help. The hook
before a step either finishes all gradients, or hides the optimizer's parameters from
this one call by empty lists; the hook after it puts the lists back and takes the step
in parts: now where gradients are complete, later where they are under way. Each part
calls the class's own ``step`` with the groups' options as they were at the user's call.
This equals one call bit for bit for optimizers that treat each parameter separately:
the exact types in `SEPARABLE_NAMES`, classes that say ``is_separable = True`` in their
own body, and what `separable` declares. A subclass may do anything else, so it is not
among them.

With a closure, the decision is taken as the closure ends: torch's optimizers call it
before they look at any parameter.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.optim.optimizer as torch_optimizer

from stretto.runtime.forward.fallback import new_reader
from stretto.runtime.forward.lazy import (
    LazyGradient,
    is_shared,
    references_to,
)
from stretto.runtime.forward.member import BucketMember, Overlap
from stretto.runtime.forward.other_threads import other_thread
from stretto.runtime.forward.pending import member_of, plainly
from stretto.runtime.forward.undisturbed import has_modes, undisturbed
from stretto.runtime.torch_compat import without_dynamo
from stretto.step_hooks import may_read, reads_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer


_O = TypeVar("_O", bound="Optimizer")

SEPARABLE_NAMES = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "ASGD",
    "Rprop",
    "Adafactor",
    "Muon",
)
"""Classes of ``torch.optim`` whose step treats each parameter separately."""

_SEPARABLE = {getattr(torch.optim, name, None) for name in SEPARABLE_NAMES} - {None}

_REFERENCES = 5
"""A parameter's count: its Python object, its gradient's node, and the Reducer."""

_declared: weakref.WeakSet[Any] = weakref.WeakSet()
_stepped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Optimizers that have made a step, and which of their options were on in it.

Each first step, also after an option was switched on, is executed as it is called: it
makes the states, in the usual order.
"""


class _Executing(threading.local):
    """Whether this thread is in a part of a deferred step."""

    active = False


_executing = _Executing()


def separable(optimizer: _O) -> _O:
    """Declare that an optimizer's step treats each parameter separately.

    Its step may then be executed bucket by bucket, each with a part of the parameters.
    The result must not depend on how they are divided: no norm over all gradients, no
    counter in a parameter group. Optimizers of ``torch.optim`` need no declaration.

    Args:
        optimizer: The optimizer, which is returned.
    """
    _declared.add(optimizer)
    return optimizer


@final
class Update:
    """One call of an optimizer's ``step``, executed in parts."""

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Iterable[int],
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        # The program may load or clear states before this is executed.
        state = optimizer.state
        with plainly():
            self._states = {p: state[p] for p in parameters if p in state}
        self._options = {
            index: {
                key: _copied(value)
                for key, value in optimizer.param_groups[index].items()
                if key != "params"
            }
            for index in groups
        }

    def execute(self, members: Sequence[BucketMember]) -> None:
        """Execute the step on these parameters, whose gradients are in place."""
        groups: dict[int, list[torch.Tensor]] = {}
        for member in members:
            groups.setdefault(member.group, []).append(member.parameter)
        call_step(
            self._optimizer,
            [
                {**self._options[index], "params": groups[index]}
                for index in sorted(groups)
            ],
            self._states,
        )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(v) for v in value)
    return {k: _copied(v) for k, v in value.items()} if type(value) is dict else value


def call_step(
    optimizer: Any, groups: list[dict[str, Any]], states: dict[Any, Any] | None = None
) -> None:
    """Call an optimizer's own step, without its hooks, with other groups.

    With ``states``, these are its states for the call, whatever it has now.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    own, state = optimizer.param_groups, optimizer.state
    before, _executing.active = _executing.active, True
    optimizer.param_groups = groups
    if states:
        optimizer.state = defaultdict(dict, states)
    try:
        with undisturbed():
            step(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = own, state
        _executing.active = before


# The hooks.


@dataclass(slots=True)
class _Hidden:
    """Parameters that an optimizer's running step must not see."""

    optimizer: Any
    lists: list[tuple[dict[str, Any], list[torch.Tensor]]]
    members: list[BucketMember]
    others: list[tuple[int, list[torch.Tensor]]]


_hidden: dict[int, _Hidden] = {}
_live: weakref.WeakSet[Overlap] = weakref.WeakSet()
_handles: list[Any] = []


def attach(overlap: Overlap) -> None:
    """Let optimizers' steps be deferred for a model."""
    _live.add(overlap)
    if not _handles:
        _handles.append(torch_optimizer.register_optimizer_step_pre_hook(_before))
        _handles.append(torch_optimizer.register_optimizer_step_post_hook(_after))


def detach(overlap: Overlap) -> None:
    """End that; the hooks go with the last model."""
    _live.discard(overlap)
    if not _live and not _hidden:
        for handle in _handles:
            handle.remove()
        _handles.clear()


@reads_nothing
def _before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A compiled step has finished all, and is compiled as if there were no hook.
    if torch.compiler.is_compiling():
        return None
    return _before_step(optimizer, args, kwargs)


def _has_foreign_hooks(parameter: Any) -> bool:
    """Return whether a program's hooks get a parameter in backward."""
    hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return bool(hooks) and not all(
        str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(
            "stretto."
        )
        for hook in hooks.values()
    )


@reads_nothing
def _after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _after_step(optimizer, args, kwargs)


@without_dynamo
def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _executing.active:
        return None
    show_hidden()
    given = args[1:] if args and args[0] is optimizer else args
    closure = given[0] if given else kwargs.get("closure")
    if not callable(closure):
        _decide(optimizer)
        return None

    @functools.wraps(closure)
    def decide_after() -> Any:
        result = closure()
        _decide(optimizer)
        return result

    if given:
        return (*args[: len(args) - len(given)], decide_after, *given[1:]), kwargs
    return args, {**kwargs, "closure": decide_after}


def _decide(optimizer: Any) -> None:
    """Finish the optimizer's gradients, or hide their parameters from its step."""
    _finish_earlier(optimizer)
    owners, members, others = _sorted_out(optimizer)
    if not members and not owners:
        return
    for owner in owners:
        owner.finish_ended()
    if any(member.gradient is None for member in members):
        owners, members, others = _sorted_out(optimizer)
    why = _why_not(optimizer, members)
    if why is not None or _stepped.get(optimizer) != _in_use(optimizer) or not members:
        for owner in owners:
            owner.refuse(why or "")
        return
    lists = [(group, group["params"]) for group in optimizer.param_groups]
    _hidden[id(optimizer)] = _Hidden(optimizer, lists, members, others)
    for group, _ in lists:
        group["params"] = []


def _in_use(optimizer: Any) -> list[Any]:
    """Return what decides which states a step makes: options, and existing states."""
    return [
        bool(optimizer.state),
        *(
            {k: bool(v) for k, v in group.items() if isinstance(v, bool | int | float)}
            for group in optimizer.param_groups
        ),
    ]


def _finish_earlier(optimizer: Any) -> None:
    """Execute earlier steps on these parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            member = member_of(parameter)
            if member is not None and member.update is not None:
                member.owner.touch(member)


def _sorted_out(
    optimizer: Any,
) -> tuple[list[Overlap], list[BucketMember], list[tuple[int, list[torch.Tensor]]]]:
    """Return the models with unfinished gradients, their members, and the others.

    If a program has moved a gradient under way to another parameter, it is finished.
    """
    owners: dict[int, Overlap] = {}
    members: list[BucketMember] = []
    others: list[tuple[int, list[torch.Tensor]]] = []
    with plainly():
        for index, group in enumerate(optimizer.param_groups):
            rest = []
            for parameter in group["params"]:
                gradient = parameter.grad
                member = None
                if type(gradient) is LazyGradient:
                    member = gradient.member
                    if gradient.finish is None:
                        parameter.grad = gradient.target
                    elif member is None or member.parameter is not parameter:
                        gradient.finish()
                        parameter.grad = gradient.target
                        member = None
                if member is None:
                    rest.append(parameter)
                else:
                    member.group = index
                    members.append(member)
                    owners[id(member.owner)] = member.owner
            others.append((index, rest))
    return list(owners.values()), members, others


def _why_not(optimizer: Any, members: Sequence[BucketMember]) -> str | None:
    """Return why a step can't be deferred, or "" to wait without a log line."""
    kind = type(optimizer)
    if (
        kind not in _SEPARABLE
        and optimizer not in _declared
        and not vars(kind).get("is_separable", False)
    ):
        return (
            f"{kind.__module__}.{kind.__qualname__} is not known to treat each "
            "parameter separately, so its step waits for all gradients. If it does, "
            "declare it with stretto.separable(optimizer)"
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"the step of {kind.__qualname__} is compiled"
    if optimizer.defaults.get("differentiable"):
        return f"{kind.__qualname__} is differentiable"
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),  # noqa: SLF001
        *optimizer._optimizer_step_post_hooks.values(),  # noqa: SLF001
        *torch_optimizer._global_optimizer_pre_hooks.values(),  # noqa: SLF001
        *torch_optimizer._global_optimizer_post_hooks.values(),  # noqa: SLF001
    )
    if may_read(hooks, optimizer):
        return f"{kind.__qualname__} has step hooks, which may read all parameters"
    if getattr(optimizer, "grad_scale", None) is not None or has_modes():
        return ""
    reader = new_reader() or other_thread()
    if reader is not None:
        return reader
    state = optimizer.state
    with plainly():
        counts = [references_to(member.parameter) for member in members]
        usual = min([*counts, _REFERENCES])
        for member, count in zip(members, counts, strict=True):
            parameter = member.parameter
            if count > usual:
                return (
                    f"parameter {member.name!r} is also held in C++, by a scripted or "
                    "traced module or a graph without its backward, whose reads can't "
                    "be seen"
                )
            if _has_foreign_hooks(parameter):
                return f"parameter {member.name!r} has hooks that get it in backward"
            if state:
                found = state.get(parameter)
                if not isinstance(found, dict):
                    return ""
                member.states = [
                    v for v in found.values() if isinstance(v, torch.Tensor)
                ]
                if len(member.states) < len(found):
                    return (
                        f"{kind.__qualname__} keeps other values than tensors in its "
                        "state, whose readers can't be seen"
                    )
                if any(map(is_shared, member.states)):
                    return (
                        f"a state of parameter {member.name!r} shares its memory with "
                        "another tensor, whose readers can't be seen"
                    )
            if is_shared(parameter):
                return (
                    f"parameter {member.name!r} shares its memory with another "
                    "tensor, whose readers can't be seen"
                )
    return None


@without_dynamo
def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _executing.active:
        return
    _stepped[optimizer] = _in_use(optimizer)
    hidden = _hidden.pop(id(optimizer), None)
    if hidden is None:
        return
    _show(hidden)
    update = Update(
        optimizer,
        {member.group for member in hidden.members},
        [member.parameter for member in hidden.members],
    )
    owners: dict[int, tuple[Overlap, list[BucketMember]]] = {}
    for member in hidden.members:
        found = owners.setdefault(id(member.owner), (member.owner, []))
        found[1].append(member)
    for owner, members in owners.values():
        owner.defer(update, members)
    groups = [
        {**optimizer.param_groups[index], "params": rest}
        for index, rest in hidden.others
        if any(parameter.grad is not None for parameter in rest)
    ]
    if groups:
        call_step(optimizer, groups)


def _show(hidden: _Hidden) -> None:
    for group, parameters in hidden.lists:
        if not group["params"]:
            group["params"] = parameters


def show_hidden() -> None:
    """Show parameters again after a step that ended with an error."""
    while _hidden:
        _show(_hidden.popitem()[1])
