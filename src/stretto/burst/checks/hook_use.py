"""Check that hooks which change gradients or activations are on all ranks.

# Note [Hooks on some ranks]
A rank calls the hooks of the layers that it runs. If a hook that changes something is
on one rank only, another model is trained than in one process. A hook that only looks,
such as a logger on the first rank, is right. So with each forward ranks compare which
hooks there are. Where these differ, each rank observes what its hooks do: one that
returns a value or writes into a tensor must be on every rank. The hook of a layer that
the rank does not run is not called there, so it can't be observed. It must be on every
rank too, unless the rank called the same function for another module of that type (or
for a gradient with as many dimensions) and it changed nothing.

Hooks are compared by the names and lines of their functions, because values that a
function closes over may differ for good reasons.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from stretto.burst.checks.later_hooks import LaterHook, ObservedHook
from stretto.burst.checks.numbers import number_of_words
from stretto.burst.hooks import (
    HOOKS,
    HOOKS_OF_ALL,
    gradient_hooks,
    has_of_all,
    hooks_of_node,
    is_of_several,
    place_of,
    post_hooks,
    times_registered,
)
from stretto.burst.tracing.backward_reads import BACKWARD_HOOKS
from stretto.errors import RankDisagreement, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stretto.burst.tracing.backward_reads import Place
    from stretto.burst.tracing.proven import Proven
    from stretto.runtime.agreement import Ranks

_ALL = "all modules"


@final
class HookUse:
    """The hooks of one model on this rank.

    ``gather`` returns every rank's text. All ranks call it if their hooks differ and
    one of them changes something or may.
    """

    num_values: ClassVar[int] = 3

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
        """Whether ranks had different hooks at the last forward."""
        self._registered = -1
        """Count of registered hooks when the parameters last had none; -1 before."""
        self._elsewhere: dict[int, type] = {}
        """The types of modules and parameters that only other ranks run, by ids."""
        self._changed: set[str] = set()
        """Hooks that have changed something."""
        self._seen: dict[tuple[str, Any], bool] = {}
        """Whether functions changed something, by their names and what they got."""
        self._had_forward = self._had_backward = False
        """Whether one has ended since ranks had different hooks."""
        self._last = (0, 0)
        self._checked: set[tuple[str, str, int]] = set()
        """Hooks of modules that a capture has checked: place, kind, number."""
        self._later: dict[tuple[str, str, int], LaterHook] = {}
        """Other hooks, see Note [Later hooks] in `later_hooks`."""
        self._has_later = False
        self._of_all: set[tuple[str, int]] | None = None
        """Hooks of all modules that came before the first capture."""
        self._gradient_hooks: dict[tuple[str, str, int], Place] = {}
        self._active: set[Place] = set()
        """Hooks on gradients that have changed some in a check."""
        self._quiet: set[tuple[str, str, int]] = set()
        """Hooks that have not."""
        self.proven: Proven | None = None
        """The check of the capture that runs."""
        self._accepted: set[tuple[tuple[int, ...], ...]] = set()

    def watch(
        self,
        module: nn.Module,
        parameters: Iterable[tuple[str, nn.Parameter]],
        layers: Iterable[tuple[nn.Module, bool]],
    ) -> None:
        """Compare the hooks of these from now on; every rank must pass the same.

        ``layers`` are parts of the module, and whether this rank runs each.
        """
        self._parameters = list(parameters)
        self._registered = -1
        self._names = {id(p): name for name, p in self._parameters}
        self._modules = [
            (name, vars(part), part) for name, part in module.named_modules()
        ]
        parts = [(part, is_here) for layer, is_here in layers for part in _parts(layer)]
        here = {id(part) for part, is_here in parts if is_here}
        known = {*self._names, *(id(part) for part in module.modules())}
        self._elsewhere = {
            id(part): type(part)
            for part, _ in parts
            if id(part) in known and id(part) not in here
        }
        self._accepted.clear()

    # What hooks do on this rank.

    def forward_ended(self) -> None:
        """Record that this rank has called the forward hooks that it can call."""
        self._had_forward = self._differ

    def backward_ended(self) -> None:
        """Record that this rank has called the gradients' hooks that it can call."""
        self._had_backward = self._differ

    def _forget_calls(self) -> None:
        self._seen.clear()
        self._had_forward = self._had_backward = False

    def run_hooks(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Return a gradient as the program's hooks on its parameter return it."""
        for hook in gradient_hooks(parameter):
            if is_of_several(hook):
                raise _of_several(self._names.get(id(parameter)))
            before = grad._version  # noqa: SLF001
            found = hook(grad)
            is_changed = grad._version != before or not (found is None or found is grad)  # noqa: SLF001
            self._note(self._key_of(parameter, hook), hook, grad.dim(), is_changed)
            grad = grad if found is None else found
        return grad

    def refused(self) -> StrettoError | None:
        """Return the error of a hook that can't be called as one process calls it."""
        for parameter, hook in self._parameter_hooks():
            if is_of_several(hook):
                return _of_several(self._names.get(id(parameter)))
        return self._refused_node()

    def require_callable(self) -> None:
        """Require that hooks since the forward can be called as one process does.

        Raises:
            StrettoError: one can't.
        """
        if (error := self.refused()) is not None:
            raise error

    def _refused_node(self) -> StrettoError | None:
        if (now := times_registered()) == self._registered:
            return None
        for name, parameter in self._parameters:
            found = hooks_of_node(parameter)
            if found:
                return StrettoError(
                    f"{_name_of(found[0])} is a hook of the autograd node of parameter "
                    f"{name!r}, which a burst model's gradients do not pass: use "
                    "register_hook or register_post_accumulate_grad_hook of the "
                    "parameter"
                )
        self._registered = now
        return None

    def call_after(self, parameter: nn.Parameter) -> None:
        """Call the program's hooks that follow the accumulation of a gradient."""
        for hook in post_hooks(parameter):
            before = _state_of(parameter)
            if hook(parameter) is not None:
                raise StrettoError(
                    f"{place_of(hook)}the hook {_name_of(hook)} after the accumulation "
                    "of a gradient returned a value, where PyTorch requires None: let "
                    "it return nothing"
                )
            is_changed = _state_of(parameter) != before
            self._note(self._key_of(parameter, hook), hook, parameter.dim(), is_changed)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the hooks of modules, and of a backward of this forward."""
        self._look_at_root()
        if not (self._differ or self._has_later):
            yield
            return
        replaced = []
        for where, kind, hooks, _ in self._module_hooks():
            kept = dict(hooks)
            replaced.append((hooks, kept))
            for number, hook in kept.items():
                key = _key(where, kind, hook)
                later = self._later_hook((where, kind, number), key, hook)
                if self._differ or later is not None:
                    note = partial(self._note_call, key, hook)
                    hooks[number] = ObservedHook(hook, kind, note, later)
        try:
            yield
        finally:
            for hooks, kept in replaced:
                hooks.update(
                    {number: kept[number] for number in hooks if number in kept}
                )

    def note_checked(self, module: nn.Module, proven: Proven | None) -> None:
        """Record that a capture has checked the hooks that a module now has.

        Hooks of all modules count if they came before the first capture.

        Args:
            module: the whole model.
            proven: the check; without one, hooks on gradients count as active.
        """
        self._later.clear()
        if self._of_all is None:
            self._of_all = {(k, n) for k, held in HOOKS_OF_ALL.items() for n in held}
        places = {
            (_ALL, k, n): (0, k, n) for k, n in self._of_all if k in BACKWARD_HOOKS
        }
        self._checked = {(_ALL, k, n) for k, n in self._of_all}
        for name, part in module.named_modules():
            held = vars(part)
            where = _where(name)
            self._checked.update((where, k, n) for k in HOOKS for n in held[k])
            for kind in BACKWARD_HOOKS:
                for number in held[kind]:
                    places[where, kind, number] = id(part), kind, number
        self._gradient_hooks = places
        self.follow(proven)

    def follow(self, proven: Proven | None) -> None:
        """Record which hooks on gradients a check has found to change some."""
        self.proven = proven
        if proven is None:
            self._active.update(self._gradient_hooks.values())
        else:
            self._active.update(proven.active)
        self._quiet = {
            place
            for place, number in self._gradient_hooks.items()
            if number not in self._active
        }
        for place in [p for p in self._later if p not in self._quiet]:
            if place in self._checked:
                del self._later[place]

    def later_of_all(self) -> dict[tuple[str, int], Any]:
        """Return the hooks of all modules that no capture has checked."""
        if self._of_all is None or not has_of_all():
            return {}
        known = self._of_all
        return {
            (kind, number): hook
            for kind, hooks in HOOKS_OF_ALL.items()
            for number, hook in hooks.items()
            if (kind, number) not in known and not _is_strettos(hook)
        }

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Remove later hooks of all modules meanwhile: no capture depends on them."""
        later = self.later_of_all()
        for kind, number in later:
            del HOOKS_OF_ALL[kind][number]
        try:
            yield
        finally:
            for (kind, number), hook in later.items():
                HOOKS_OF_ALL[kind][number] = hook

    def _look_at_root(self) -> None:
        """Notice hooks of the whole model, which run before the ranks' exchange."""
        if has_of_all() and not self._has_later:
            self._has_later = bool(self.later_of_all())
        root = next(iter(self._modules), None)
        known = next(iter(self._hooked), None)
        if root is not known and root and any(root[1][kind] for kind in HOOKS):
            self._hooked.insert(0, root)
            self._has_later |= self._any_later()

    def _any_later(self) -> bool:
        return any(
            self._may_only_look((where, kind, number))
            for where, kind, hooks, _ in self._module_hooks()
            for number in hooks
        )

    def _later_hook(
        self, place: tuple[str, str, int], key: str, hook: Any
    ) -> LaterHook | None:
        """Return a hook that may only look; None for another one."""
        if not self._may_only_look(place) or _is_strettos(hook):
            return None
        if place not in self._later:
            is_quiet = place in self._quiet
            self._later[place] = LaterHook(hook, key, is_quiet=is_quiet)
        return self._later[place]

    def _may_only_look(self, place: tuple[str, str, int]) -> bool:
        """Return whether no capture has checked a hook, or found it to only look."""
        return place not in self._checked or place in self._quiet

    def _note_call(self, key: str, hook: Any, kind: type, is_changed: bool) -> None:  # noqa: FBT001
        self._note(key, hook, kind, is_changed)

    def with_forward_hooks(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that had forward hooks at the exchange, with names."""
        return [
            (name, part)
            for name, held, part in self._hooked
            if held["_forward_hooks"] or held["_forward_pre_hooks"]
        ]

    def _note(self, key: str, hook: Any, kind: Any, is_changed: bool) -> None:  # noqa: FBT001
        if is_changed:
            self._changed.add(key)
        seen = _name_of(hook), kind
        self._seen[seen] = is_changed or self._seen.get(seen, False)

    def _key_of(self, parameter: nn.Parameter, hook: Any) -> str:
        return _key(f"parameter {self._names.get(id(parameter))!r}", "", hook)

    def _module_hooks(self) -> Iterator[tuple[str, str, dict[int, Any], Any]]:
        """Yield each group of hooks: place, kind, hooks, their module (None: all)."""
        for kind, hooks in HOOKS_OF_ALL.items():
            if hooks:
                yield _ALL, kind, hooks, None
        for name, held, part in self._hooked:
            for kind in HOOKS:
                if held[kind]:
                    yield _where(name), kind, held[kind], part

    def _unknown(self) -> set[str]:
        """Return hooks that, as far as this rank knows, may change something."""
        if not self._differ:
            return set()
        found = set()
        if self._had_backward:
            for parameter, hook in self._parameter_hooks():
                is_elsewhere = id(parameter) in self._elsewhere
                kinds = {parameter.dim()} if is_elsewhere else set()
                if parameter.requires_grad and not self._is_quiet(hook, kinds):
                    found.add(self._key_of(parameter, hook))
        for where, kind, hooks, part in self._module_hooks():
            if self._had_forward if "forward" in kind else self._had_backward:
                types = self._types_elsewhere(part)
                some = [h for h in hooks.values() if not self._is_quiet(h, types)]
                found.update(_key(where, kind, hook) for hook in some)
        return found

    def _types_elsewhere(self, part: nn.Module | None) -> set[type]:
        """Return the types of modules that only other ranks run, one or all."""
        if part is None:
            return {t for t in self._elsewhere.values() if issubclass(t, nn.Module)}
        return {type(part)} if id(part) in self._elsewhere else set()

    def _is_quiet(self, hook: Any, kinds: Iterable[Any]) -> bool:
        """Return whether a function changed nothing of any of these kinds."""
        name = _name_of(hook)
        return _is_strettos(hook) or not any(
            self._seen.get((name, kind), True) for kind in kinds
        )

    # The exchange between ranks.

    def next_values(self) -> list[int]:
        """Return `num_values` numbers to exchange."""
        one, two, three, four = HOOKS
        self._hooked = [
            row
            for row in self._modules
            if row[1][one] or row[1][two] or row[1][three] or row[1][four]
        ]
        self._has_later = self._any_later()
        now = _number(self._on_parameters()), _number(self._on_modules())
        if now != self._last:
            self._last = now
            self._changed.clear()
            self._forget_calls()
        return [*now, _number(sorted(self._changed | self._unknown()))]

    def _on_parameters(self) -> list[str]:
        return [self._key_of(parameter, h) for parameter, h in self._parameter_hooks()]

    def _parameter_hooks(self) -> list[tuple[nn.Parameter, Any]]:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return [
                (parameter, hook)
                for _, parameter in self._parameters
                if _may_have_hooks(parameter)
                for hook in (*gradient_hooks(parameter), *post_hooks(parameter))
            ]

    def _on_modules(self) -> list[str]:
        return [
            _key(where, kind, hook)
            for where, kind, hooks, _ in self._module_hooks()
            for hook in hooks.values()
            if not _is_strettos(hook)
        ]

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged, the same on all ranks.

        Raises:
            RankDisagreement: on every rank, naming the hook and the ranks.
        """
        self.is_on_parameters = any(row[0] for row in rows)
        found = tuple(map(tuple, rows))
        self._differ = len({row[:2] for row in found}) > 1
        if not self._differ:
            self._forget_calls()
            return
        if not any(row[2] for row in rows) or found in self._accepted:
            return
        self._compare()
        self._accepted.add(found)

    def differences(self) -> list[str]:
        """Return where ranks have different hooks, the same on all ranks.

        Collective where the last exchange found different hooks.
        """
        if not self._differ:
            return []
        texts = [json.loads(text) for text in self._gather(json.dumps(self._all()))]
        found = []
        for key in sorted({key for text in texts for key in text}):
            numbers = [text.get(key, 0) for text in texts]
            if min(numbers) != max(numbers):
                found.append(self._difference(key, numbers))
        return found

    def _all(self) -> Counter[str]:
        return Counter((*self._on_parameters(), *self._on_modules()))

    def _compare(self) -> None:
        every = self._all()
        unknown = self._unknown() - self._changed
        mine = {"changed": [*self._changed], "unknown": [*unknown], "hooks": every}
        texts = [json.loads(text) for text in self._gather(json.dumps(mine))]
        for what in ("changed", "unknown"):
            for key in sorted({key for text in texts for key in text[what]}):
                numbers = [text["hooks"].get(key, 0) for text in texts]
                if min(numbers) != max(numbers):
                    raise self._refusal(what, key, numbers)

    def _refusal(self, what: str, key: str, numbers: Sequence[int]) -> RankDisagreement:
        """Return the error of a hook, by its number on each rank."""
        where = self._difference(key, numbers)
        if what == "changed":
            return RankDisagreement(
                "a hook changes what the model computes, but is not on every rank: "
                f"{where}. Register hooks that return or write values in the same way "
                "on all ranks"
            )
        return RankDisagreement(
            "a hook may change what the model computes, but is not on every rank: "
            f"{where}. A rank that has it does not run its layer, so its effect is "
            "unknown. Register it in the same way on all ranks or, if it returns and "
            "writes nothing, on the ranks that run the layer"
        )

    def _difference(self, key: str, numbers: Sequence[int]) -> str:
        largest = max(numbers)
        have = [rank for rank, number in enumerate(numbers) if number == largest]
        lack = [rank for rank, number in enumerate(numbers) if number < largest]
        name_all = self._ranks.name_all
        return f"{key} is on {name_all(have)} and missing on {name_all(lack)}"


def _of_several(name: str | None) -> StrettoError:
    return StrettoError(
        "torch.autograd.graph.register_multi_grad_hook was called with parameter "
        f"{name!r}, but a rank has gradients only of the layers that it runs, and only "
        "when backward has ended: use register_hook or "
        "register_post_accumulate_grad_hook of each parameter, or do it after "
        "backward()"
    )


def _parts(layer: nn.Module) -> list[nn.Module | nn.Parameter]:
    return [*layer.modules(), *layer.parameters()]


def _is_strettos(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("stretto.")


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


def _name_of(hook: Any) -> str:
    name = str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)
    if (code := getattr(hook, "__code__", None)) is not None:
        name = f"{name} (line {code.co_firstlineno})"
    return name


def _where(name: str) -> str:
    return f"module {name!r}" if name else "the whole model"


def _key(where: str, kind: str, hook: Any) -> str:
    name = _name_of(hook)
    kind = kind.strip("_").removesuffix("s").replace("_", " ") or "hook"
    return f"the {kind} {name} of {where}"


def _number(keys: Sequence[str]) -> int:
    """Return a number for these that is 0 only without any."""
    if not keys:
        return 0
    return number_of_words(keys) | 1
