"""Learn what a program reads between a backward and its next forward.

# Note [A rehearsal]
Before a plan lets communication continue during the next forward, a few steps show
whether the program leaves it room. Their gradients are complete, so nothing waits: each
gets a wrapper after backward, as under a forward plan, and the optimizer's step is
executed at once in the way that a forward plan executes it. Then parameters and states
get the classes of pending ones until they are read. So every read is noticed by the
same means as later, and none can find a wrong value.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, final

import torch

from stretto.runtime.forward import other_threads, raw_access, steps
from stretto.runtime.forward.lazy import LazyGradient, is_held, wrap
from stretto.runtime.forward.member import BucketMember
from stretto.runtime.forward.module_hooks import ModuleHooks
from stretto.runtime.forward.pending import guard, plainly, unguard
from stretto.runtime.forward.undisturbed import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

    from torch import nn

    from stretto.runtime.forward.member import DeferredUpdate

OFTEN_RATIO = 0.5
"""Reads in more than this share of the steps count as done in each."""

_FIRST_STEPS = 1
"""An optimizer's first step is never deferred."""


class ReadsReport(TypedDict):
    """The findings of one rank."""

    prevents: str | None
    """Why steps can't be deferred, or ``None``."""

    early: list[str]
    """Names of parameters that are read before the next forward, in most steps."""

    reader: str | None
    """The code that reads them, as a sentence."""


class Reader(NamedTuple):
    """A place in a program."""

    place: str
    """File and line."""

    call: str
    """PyTorch's function that is called there, or empty."""

    def text(self, what: str) -> str:
        """Return a sentence of what is read here."""
        call = f" ({self.call})" if self.call else ""
        return f"{self.place} reads {what}{call}"


@final
class ReadWatch:
    """Watches a model's gradients and parameters from a backward to a forward's end.

    Between two steps the caller calls `backward_ended`; the model calls the others.
    """

    def __init__(
        self,
        root: nn.Module,
        table: Sequence[tuple[str, nn.Parameter]],
        *,
        seen: set[str],
        poisons: bool,
        by_parts: bool = False,
    ) -> None:
        """Prepare.

        Args:
            root: The model that DDP wraps.
            table: Names and parameters.
            seen: Gets the names of parameters whose reads in forward show.
            poisons: Whether to fill what is watched with NaN until it is read.
            by_parts: Whether a plan will know norms before gradients.
        """
        self._members = tuple(
            BucketMember(self, name, parameter, 0, i, 0)
            for i, (name, parameter) in enumerate(table)
        )
        self._module_hooks = ModuleHooks(self, root)
        self._seen = seen
        self._poisons = poisons
        self._by_parts = by_parts
        self._lock = threading.RLock()
        self._wrapped: dict[BucketMember, None] = {}
        self._guarded: dict[BucketMember, None] = {}
        self._in_forward = False
        self._refused: str | None = None
        self._steps = 0
        self._deferred = 0
        self._gradient_reader: Reader | None = None
        self._early: dict[str, int] = {}
        """How often each parameter was read before forward."""

        self._early_now: set[str] = set()
        self._reader: str | None = None
        self._stepped = False
        """Whether a step was taken since the last backward."""

        steps.attach(self)
        other_threads.attach(self)

    def report(self) -> ReadsReport:
        """Return what was learned so far."""
        often = OFTEN_RATIO * (self._steps - _FIRST_STEPS)
        prevents = None
        if self._deferred == 0 or self._deferred < often:
            prevents = self._why_never()
        early = [n for n, times in self._early.items() if times > often]
        reader = self._reader if early else None
        return ReadsReport(prevents=prevents, early=early, reader=reader)

    def _why_never(self) -> str:
        if self._refused is not None:
            return self._refused
        if self._gradient_reader is not None:
            what = self._gradient_reader.text("gradients before optimizer.step()")
            return f"{what}, so all must have arrived there"
        if self._steps <= _FIRST_STEPS:
            return "too few steps could be watched"
        return (
            "no optimizer's step was seen between backward and the next forward, or it "
            "ran under autocast, inference or other modes"
        )

    # Called between a backward and the next forward.

    def backward_ended(self) -> None:
        """Watch the gradients from here on."""
        if not self._members:
            return
        self._steps += 1
        self._stepped = False
        self._early_now.clear()
        why = other_threads.other_thread()
        if why is not None:
            self._refused = why
            return
        raw_access.watch(self)
        with self._lock:
            self._wrap(self._members)

    def _wrap(self, members: Iterable[BucketMember]) -> None:
        """Put wrappers in place of gradients."""
        with plainly():
            for member in members:
                gradient = member.parameter.grad
                if gradient is None or type(gradient) is LazyGradient:
                    continue
                if gradient.requires_grad or is_held(gradient):
                    self._refused = (
                        f"the program keeps the gradient of {member.name!r} over "
                        "steps, or it requires gradients itself"
                    )
                    continue
                member.gradient = gradient
                member.lazy = wrap(
                    gradient,
                    self._read_gradients,
                    member,
                    member.lazy,
                    by_parts=self._by_parts and not self._stepped,
                )
                member.parameter.grad = member.lazy
                self._wrapped[member] = None

    def _read_gradients(self) -> None:
        """Note that something reads a gradient, for which all must have arrived."""
        if self._wrapped:
            if self._stepped:
                self._note_early(self._members, "gradients")
            else:
                self._gradient_reader = _reader()
        self._restore()

    def _restore(self, members: Iterable[BucketMember] | None = None) -> None:
        """Put the gradients back in place of their wrappers."""
        with self._lock, plainly():
            for member in list(self._wrapped if members is None else members):
                if member not in self._wrapped:
                    continue
                del self._wrapped[member]
                if member.parameter.grad is member.lazy:
                    member.parameter.grad = member.gradient
                member.gradient = None
                member.release_lazy()

    def warn(self, why: str) -> None:
        """Note why a step can't be deferred."""
        self._refused = why

    def refuse(self, why: str) -> None:
        """Note why an optimizer's step can't be deferred, and let it run."""
        self._restore()
        if why:
            self._refused = why

    def finish_ended(self) -> None:
        """Do nothing: a wrapper shows who reads its gradient."""

    def defer(self, update: DeferredUpdate, members: Iterable[BucketMember]) -> None:
        """Execute an optimizer's step at once, then watch its parameters."""
        with self._lock:
            found = [member for member in members if member in self._wrapped]
            for member in found:
                self.touch(member)
            self._restore(found)
            update.execute(found)
            self._deferred += not self._stepped
            self._stepped = True
            self._wrap(found)
            for member in found:
                states = member.states
                if self._poisons:
                    member.poison(states)
                if guard(member, states):
                    self._guarded[member] = None
                else:
                    self._refused = (
                        f"PyTorch refers weakly to parameter {member.name!r}, whose "
                        "readers can't be seen"
                    )
                    member.heal()
                member.states = []
            if self._module_hooks.changed():
                self._module_hooks.remove()
                self._module_hooks.build(self._members)
            self._module_hooks.install()

    def touch(self, member: BucketMember) -> None:
        """Note that something reads a parameter."""
        with self._lock:
            if member not in self._guarded:
                return
            if self._in_forward:
                self._seen.add(member.name)
            else:
                self._note_early((member,), "parameters")
            self._unwatch(member)

    def _note_early(self, members: Iterable[BucketMember], what: str) -> None:
        """Note a read before the next forward; the first of a step is reported."""
        if not self._early_now:
            self._reader = _reader().text(
                f"{what} between optimizer.step() and the next forward"
            )
        for member in members:
            if member.name not in self._early_now:
                self._early_now.add(member.name)
                self._early[member.name] = self._early.get(member.name, 0) + 1

    def _unwatch(self, member: BucketMember) -> None:
        self._guarded.pop(member, None)
        unguard(member)
        if member.aside:
            with undisturbed():
                member.heal()

    def _unwatch_all(self) -> None:
        with self._lock:
            for member in list(self._guarded):
                self._unwatch(member)

    def finish_all(self, *, keep_hooks: bool = False) -> None:
        """Note that something reads everything; a forward without gradients does."""
        steps.show_hidden()
        with self._lock:
            if self._wrapped:
                self._read_gradients()
            if self._guarded and not self._in_forward:
                self._note_early(self._guarded, "parameters")
            self._unwatch_all()
            if not keep_hooks:
                self._module_hooks.remove()

    def norm_of(self, member: BucketMember) -> torch.Tensor | None:
        """Return a gradient's norm, which a plan will know before the gradient."""
        if member not in self._wrapped:
            return None
        gradient: Any = member.gradient
        with undisturbed():
            found: torch.Tensor = torch.linalg.vector_norm(gradient)
        return found

    def scale(
        self, member: BucketMember, multiply: Callable[..., Any], factor: Any
    ) -> None:
        """Multiply a gradient, which a plan will do once it has arrived."""
        lazy = member.lazy
        if lazy is not None and lazy.target is not None:
            with undisturbed():
                multiply(lazy.target, factor)

    def show_gradients(self) -> None:
        """Note that something reads gradients."""
        self._read_gradients()

    def finish_for_thread(self) -> None:
        """Stop watching, because a thread starts; it finds the usual parameters."""
        with self._lock:
            self._restore()
            self._unwatch_all()

    def finish_to_compile(self) -> None:
        """Stop watching, so that code is compiled for the usual classes."""
        self.finish_all(keep_hooks=True)

    # Forward.

    def begin_forward(self) -> None:
        """Note that reads are those of the model from here on."""
        steps.show_hidden()
        self._restore()
        if torch.is_grad_enabled():
            self._in_forward = True
            self.enter()
        else:
            self.finish_all()

    def enter(self) -> None:
        """Stop watching the parameters of compiled modules."""
        for member in self._module_hooks.at_entry:
            if member in self._guarded:
                self._unwatch(member)

    def end_forward(self) -> None:
        """Stop watching until the next backward."""
        self._in_forward = False
        self._unwatch_all()
        self._module_hooks.remove()
        raw_access.release(self)

    def release(self) -> None:
        """End this."""
        if not self._members:
            return
        steps.show_hidden()
        self._restore()
        self._unwatch_all()
        self._module_hooks.remove()
        raw_access.release(self)
        steps.detach(self)
        other_threads.detach(self)
        for member in self._members:
            member.twin = member.lazy = None
        self._members = ()
        self._module_hooks.clear()


# Where a program reads.

_HIDDEN_NAMES = frozenset(
    {"_call_impl", "_no_grad_wrapper", "_wrapped_call_impl", "decorate_context"}
)
"""Functions of PyTorch that call others."""


@functools.cache
def _own_folders() -> tuple[str, str]:
    own = Path(__file__).parents[2]
    return f"{Path(torch.__file__).parent}{os.sep}", f"{own}{os.sep}"


def _reader() -> Reader:
    """Return the innermost place outside of PyTorch and this package."""
    pytorch, own = _own_folders()
    call = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(pytorch):
            if code.co_name not in _HIDDEN_NAMES:
                call = code.co_name
        elif not (file.startswith((own, "<")) or _is_of_python(file)):
            return Reader(f"{shown_path(file)}:{frame.f_lineno}", _shown_call(call))
        frame = frame.f_back
    return Reader("the program", _shown_call(call))


def _shown_call(name: str) -> str:
    return "" if name.startswith(("__", "<", "_fn", "inner", "wrapper")) else name


@functools.cache
def _is_of_python(file: str) -> bool:
    """Return whether a file is of the standard library."""
    library = sysconfig.get_path("stdlib")
    return file.startswith(f"{library}{os.sep}") and "-packages" not in file


def shown_path(file: str) -> str:
    """Return a source file as a message names it."""
    for part in ("site-packages", "dist-packages"):
        before, found, after = file.rpartition(f"{os.sep}{part}{os.sep}")
        if found and before:
            return after
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return Path(file).name
