"""Check that hooks which change gradients or activations are on all ranks.

# Note [Hooks on some ranks]
A rank calls the hooks of the layers that it runs. If a hook that changes something is
on one rank only, another model is trained than in one process. A hook that only looks,
such as a logger on the first rank, is right. So with each forward ranks compare which
hooks there are. Where these differ, each rank observes what its hooks do: one that
returns a value or writes into a tensor must be on every rank.

Hooks are compared by the names and lines of their functions, because values that a
function closes over may differ for good reasons.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto.burst.hooks import gradient_hooks, post_hooks
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stretto.runtime.agreement import Ranks

NUM_VALUES = 3
"""Numbers of this module in each exchange."""

_KINDS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@final
class HookUse:
    """The hooks of one model on this rank.

    ``gather`` returns every rank's text. All ranks call it if one of their hooks
    changes something and their hooks differ.
    """

    def __init__(self, ranks: Ranks, gather: Callable[[str], Sequence[str]]) -> None:
        self._ranks = ranks
        self._gather = gather
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._names: dict[int, str] = {}
        self._modules: list[tuple[str, dict[str, Any], nn.Module]] = []
        self._hooked: list[tuple[str, dict[str, Any], nn.Module]] = []
        """Modules that had hooks at the last exchange."""
        self.is_on_parameters = False
        """Whether any rank had hooks on parameters at the last forward."""
        self._differ = False
        """Whether ranks had different hooks on modules at the last forward."""
        self._changed: set[str] = set()
        self._last = (0, 0)
        self._accepted: set[tuple[tuple[int, ...], ...]] = set()

    def watch(
        self, module: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        """Compare the hooks of these from now on; every rank must pass the same."""
        self._parameters = list(parameters)
        self._names = {id(p): name for name, p in self._parameters}
        self._modules = [
            (name, vars(part), part) for name, part in module.named_modules()
        ]
        self._accepted.clear()

    # What hooks do on this rank.

    def called_back(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Return a gradient as the program's hooks on its parameter return it."""
        for hook in gradient_hooks(parameter):
            before = grad._version  # noqa: SLF001
            found = hook(grad)
            if grad._version != before or not (found is None or found is grad):  # noqa: SLF001
                self._changes(self._key_of(parameter, hook))
            grad = grad if found is None else found
        return grad

    def call_after(self, parameter: nn.Parameter) -> None:
        """Call the program's hooks that follow the accumulation of a gradient."""
        for hook in post_hooks(parameter):
            before = _state_of(parameter)
            hook(parameter)
            if _state_of(parameter) != before:
                self._changes(self._key_of(parameter, hook))

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the hooks of modules, and of a backward of this forward."""
        if not self._differ:
            yield
            return
        replaced = []
        for where, kind, hooks in self._module_hooks():
            kept = dict(hooks)
            replaced.append((hooks, kept))
            for number, hook in kept.items():
                hooks[number] = _Observed(hook, _key(where, kind, hook), self._changes)
        try:
            yield
        finally:
            for hooks, kept in replaced:
                hooks.update(
                    {number: kept[number] for number in hooks if number in kept}
                )

    def with_forward_hooks(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that had forward hooks at the exchange, with names."""
        return [
            (name, part)
            for name, held, part in self._hooked
            if held["_forward_hooks"] or held["_forward_pre_hooks"]
        ]

    def _changes(self, key: str) -> None:
        self._changed.add(key)

    def _key_of(self, parameter: nn.Parameter, hook: Any) -> str:
        return _key(f"parameter {self._names.get(id(parameter))!r}", "", hook)

    def _module_hooks(self) -> Iterator[tuple[str, str, dict[int, Any]]]:
        for name, held, _ in self._hooked:
            for kind in _KINDS:
                if held[kind]:
                    where = f"module {name!r}" if name else "the whole model"
                    yield where, kind, held[kind]

    # The exchange between ranks.

    def next_values(self) -> list[int]:
        """Return `NUM_VALUES` numbers to exchange."""
        one, two, three, four = _KINDS
        self._hooked = [
            row
            for row in self._modules
            if row[1][one] or row[1][two] or row[1][three] or row[1][four]
        ]
        now = _number(self._on_parameters()), _number(self._on_modules())
        if now != self._last:
            self._last = now
            self._changed.clear()
        return [*now, _number(sorted(self._changed))]

    def _on_parameters(self) -> list[str]:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return [
                _key(f"parameter {name!r}", "", hook)
                for name, parameter in self._parameters
                if _may_have_hooks(parameter)
                for hook in (*gradient_hooks(parameter), *post_hooks(parameter))
            ]

    def _on_modules(self) -> list[str]:
        return [
            _key(where, kind, hook)
            for where, kind, hooks in self._module_hooks()
            for hook in hooks.values()
        ]

    def require_alike(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged, the same on all ranks.

        Raises:
            RankDisagreement: on every rank, naming the hook and the ranks.
        """
        self.is_on_parameters = any(row[0] for row in rows)
        self._differ = len({row[1] for row in rows}) > 1
        found = tuple(map(tuple, rows))
        is_same = len({row[:2] for row in found}) == 1
        if is_same or not any(row[2] for row in rows) or found in self._accepted:
            return
        self._compare()
        self._accepted.add(found)

    def _compare(self) -> None:
        every = Counter((*self._on_parameters(), *self._on_modules()))
        mine = {"changed": sorted(self._changed), "hooks": every}
        texts = [json.loads(text) for text in self._gather(json.dumps(mine))]
        for key in sorted({key for text in texts for key in text["changed"]}):
            numbers = [text["hooks"].get(key, 0) for text in texts]
            most = max(numbers)
            if min(numbers) == most:
                continue
            have = [rank for rank, number in enumerate(numbers) if number == most]
            lack = [rank for rank, number in enumerate(numbers) if number < most]
            name_all = self._ranks.name_all
            raise RankDisagreement(
                f"a hook changes what the model computes, but is not on every rank: "
                f"{key} is on {name_all(have)} and missing on {name_all(lack)}. "
                "Register hooks that return or write values in the same way on all "
                "ranks"
            )


@final
class _Observed:
    """Calls a module's hook, and reports if it changes something."""

    def __init__(self, hook: Any, key: str, changes: Callable[[str], None]) -> None:
        self._hook = hook
        self._key = key
        self._report = changes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _versions_in(args)
        found = self._hook(*args, **kwargs)
        is_given = found is None or any(found is arg for arg in args)
        if not is_given or _versions_in(args) != before:
            self._report(self._key)
        return found


def _versions_in(values: Any) -> list[int]:
    return [
        0 if leaf.is_inference() else leaf._version  # noqa: SLF001
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, Tensor)
    ]


def _may_have_hooks(parameter: nn.Parameter) -> bool:
    held = parameter._backward_hooks  # noqa: SLF001
    # Each may have one of the executor's.
    return bool(
        (held and len(held) > 1) or parameter._post_accumulate_grad_hooks  # noqa: SLF001
    )


def _state_of(parameter: nn.Parameter) -> tuple[int, int, int]:
    grad = parameter.grad
    version = -1 if grad is None else grad._version  # noqa: SLF001
    return parameter._version, id(grad), version  # noqa: SLF001


def _key(where: str, kind: str, hook: Any) -> str:
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    if (code := getattr(hook, "__code__", None)) is not None:
        name = f"{name} (line {code.co_firstlineno})"
    kind = kind.strip("_").removesuffix("s").replace("_", " ") or "hook"
    return f"the {kind} {name} of {where}"


def _number(keys: Sequence[str]) -> int:
    if not keys:
        return 0
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") | 1
