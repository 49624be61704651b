"""Leases for a training script that does not request them.

Hooks on all modules and optimizers open and end the leases: one for each micro-batch,
or one for each layer in forward and in backward.

# Note [What a micro-batch's lease covers]
A task should hold the device only while it computes, so loading data is outside. A
lease begins with the first forward, and ends with the optimizer's step, after a forward
without gradients, or after a backward that another one follows before the step. Nothing
says in advance whether a step follows a backward (gradient accumulation) or a backward
a forward (evaluation without ``no_grad``). So what happened the last time is expected:
the number of backwards between two steps, and whether a model's output had a backward.
Where that was wrong, the backward or the step takes a lease of its own.

Forwards within a backward compute again what activation checkpoints left out: they
belong to its task. A forward or a backward that fails ends its lease, and so does an
interrupt, whose error no hook reports; the next forward then finds that the last one
does not run any more. A forward that continues after its lease has ended, because it
catches such an error or trains another model, takes a new one for its next module.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stretto import variable_names
from stretto.autograd_engine import graph_task_id, queue_callback
from stretto.background.board import runtime_folder
from stretto.background.child_processes import child_processes
from stretto.background.interrupts import watch_interrupts
from stretto.background.lease import Background
from stretto.background.named_device import device_name
from stretto.errors import SpecError
from stretto.logs import get_logger
from stretto.process_identity import stat_row
from stretto.schema.collocation import Collocation
from stretto.step_hooks import reads_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from stretto.background.background_statistics import BackgroundStatistics
    from stretto.background.priority import Isolation

_log = get_logger(__name__)


_NAMES = "foreground:background"


_CHILDREN_S = 0.1
"""Processor time of child processes from which the last line names it."""

_WITHOUT_S = 1.0
"""Processor time of a script that took no lease, with the processes that it has
started, from which a warning names it."""

_LEASELESS_STEPS = 3
"""Successive steps of optimizers without a lease before a warning."""

_MAX_OUTPUTS = 8
"""Tensors of a forward's output, at most, that may begin its backward."""

_MAX_FORWARDS = 8
"""Last forwards of which it is not yet known whether a backward follows."""

_UNCERTAIN = 1.0
"""Error of the foreground's loss from which the last line gives none."""

MICRO_BATCH, LAYER = "micro-batch", "layer"
SEGMENTS = (MICRO_BATCH, LAYER)


@final
class ScriptLeases:
    """Opens and ends the leases of a script, in the thread that creates this."""

    def __init__(self, background: Background, *, segments: str = MICRO_BATCH) -> None:
        """Install the hooks.

        Args:
            background: whose leases.
            segments: ``micro-batch`` or ``layer``: what one task is.

        Raises:
            SpecError: there are no such segments.
        """
        if segments not in SEGMENTS:
            raise SpecError(f"segments are {' or '.join(SEGMENTS)}, got {segments!r}")
        self._background = background
        self._by_layer = segments == LAYER
        self._thread = threading.get_ident()
        self._is_on = True
        self._has_looked = False
        self._has_warned = False
        self._top: nn.Module | None = None
        self._top_frame: FrameType | None = None
        self._depth = 0
        self._layer = 0
        self._forwards: deque[_Forward] = deque(maxlen=_MAX_FORWARDS)
        self._unused: set[str] = set()  # labels whose last output had no backward
        self._backward = -1
        self._backwards = 0  # since the last step
        self._last_stepped: weakref.ref[Optimizer] | None = None
        self._backwards_after: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._step_frame: FrameType | None = None
        self._waits = 0
        self._waits_before: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._leaseless = 0
        self._handles: list[RemovableHandle] = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._end_watch = watch_interrupts(self._failed)
        if hasattr(os, "register_at_fork"):  # such as a DataLoader's workers
            os.register_at_fork(after_in_child=self._disable)

    def close(self) -> None:
        """Remove the hooks and end the lease."""
        self._disable()
        self._end_watch()
        for handle in self._handles:
            handle.remove()
        self._background.end_task()

    def _disable(self) -> None:
        self._is_on = False

    def _applies(self) -> bool:
        if not self._is_on or torch.compiler.is_compiling():
            return False
        if threading.get_ident() == self._thread:
            return True
        # Within a forward or a backward, the main thread has the lease.
        if not self._has_warned and self._top is None and graph_task_id() == -1:
            self._has_warned = True
            _log.warning(
                "this background computes in thread %r without leases, whatever the "
                "foreground does: only its main thread waits for the device. Compute "
                "there",
                threading.current_thread().name,
            )
        return False

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if not self._applies():
            return
        if graph_task_id() != -1:
            self._before_recomputed(module)
        elif self._top is None or _has_ended(self._top_frame):
            self._top, self._depth, self._layer = module, 0, 0
            self._top_frame = _caller()
            self._look_for_ranks()
            self._learn_of_outputs()
            self._wait(_label(module))
        elif module is self._top:  # it calls itself
            self._depth += 1
        elif self._by_layer and _is_layer(module):
            self._layer += 1
            self._wait(f"{_label(self._top)} {self._layer}")
        elif not self._background.has_lease:
            self._wait(f"{_label(self._top)} rest")

    def _wait(self, label: str) -> None:
        self._waits += 1
        self._background.wait(label)

    def _before_recomputed(self, module: nn.Module) -> None:
        """Take a lease for a forward within a backward, by layer or without one."""
        if (self._by_layer and _is_layer(module)) or not self._background.has_lease:
            self._wait(f"{_label(module)} again")

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        if not self._applies() or graph_task_id() != -1 or self._top is None:
            return
        # A leaf, such as a parameter that a layer returns, keeps its hooks forever.
        has_backward = isinstance(output, Tensor) and output.grad_fn is not None
        if self._by_layer and has_backward and self._layer and _is_layer(module):
            label = f"{_label(self._top)} {self._layer} backward"
            output.grad_fn.register_prehook(lambda _: self._in_backward(label))
        if module is not self._top:
            return
        if self._depth:
            self._depth -= 1
            return
        self._top = self._top_frame = None
        # torch calls this for a forward that has failed, too, with no output.
        has_failed = output is None and sys.exc_info()[0] is not None
        if has_failed or not self._awaits_backward(module, output):
            self._background.end_task()

    def _awaits_backward(self, module: nn.Module, output: Any) -> bool:
        """Return whether a backward is expected to follow; note where it begins."""
        if not torch.is_grad_enabled():
            return False
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001
            return True  # its tensors are not those of the backward
        found = [t for t in _tensors(output) if t.grad_fn is not None]
        if not found:
            return any(p.requires_grad for p in module.parameters())
        forward = _Forward(_label(module))
        hook = functools.partial(self._backward_begins, forward)
        for node in {t.grad_fn for t in found}:
            if node is not None:
                node.register_prehook(hook)
        forward.hook = weakref.ref(hook)
        self._forwards.append(forward)
        return forward.label not in self._unused

    def _learn_of_outputs(self) -> None:
        """Note whose outputs have ended without a backward."""
        kept = []
        for forward in self._forwards:
            if forward.has_ended:
                self._unused.add(forward.label)
            elif not forward.has_backward:
                kept.append(forward)
        self._forwards = deque(kept, maxlen=_MAX_FORWARDS)

    def _backward_begins(self, forward: _Forward, _gradients: Any) -> None:
        if not self._is_on or torch.compiler.is_compiling():
            return
        forward.has_backward = True
        self._unused.discard(forward.label)
        if self._backward == graph_task_id():
            return
        self._backward = graph_task_id()
        queue_callback(_BackwardEnd(self._backward_ended, self._failed))
        if not self._background.has_lease:
            self._wait(f"{forward.label} backward")

    def _backward_ended(self) -> None:
        self._backwards += 1
        if not self._is_on or self._in_step():
            return
        last = None if self._last_stepped is None else self._last_stepped()
        if last is not None and self._backwards < self._backwards_after.get(last, 0):
            self._background.end_task()

    def _failed(self) -> None:
        """End the lease of a forward or a backward that ends with an error."""
        if self._is_on:
            self._background.withdraw()

    def _in_backward(self, label: str) -> None:
        if self._is_on:
            self._background.wait(label)

    def _in_step(self) -> bool:
        """Return whether an optimizer's step runs, such as one that has a closure."""
        return self._step_frame is not None and not _has_ended(self._step_frame)

    @reads_nothing
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._applies():
            return
        self._step_frame = _caller()
        # Compiled code may hide the forwards, see `_look_for_leases`.
        has_forwards = self._waits_before.get(optimizer, 0) != self._waits
        if has_forwards and not self._background.has_lease:
            self._background.wait(f"{type(optimizer).__qualname__} step")

    @reads_nothing
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._applies():
            return
        self._step_frame = None
        self._background.end_task()
        self._look_for_leases(optimizer)
        last = None if self._last_stepped is None else self._last_stepped()
        if last is not None:
            self._backwards_after[last] = self._backwards
        self._backwards_after.setdefault(optimizer, self._backwards)
        self._last_stepped, self._backwards = weakref.ref(optimizer), 0

    def _look_for_leases(self, optimizer: Optimizer) -> None:
        """Warn of an optimizer that steps without a lease since its last step."""
        before = self._waits_before.get(optimizer)
        self._waits_before[optimizer] = self._waits
        if before != self._waits:
            self._leaseless = 0
            return
        self._leaseless += 1
        isolation = self._background.isolation
        if self._leaseless != _LEASELESS_STEPS or _works(isolation):
            return
        _log.warning(
            "this background trains without leases of %s, whatever the foreground "
            "does: they are taken for forwards of torch.nn modules, which compiled "
            "code hides. Use torch.compile(model) instead of model.compile() or a "
            "compiled function, or take leases with `with background.lease():` of a "
            "stretto.Background",
            self._background.device_name,
        )

    def _look_for_ranks(self) -> None:
        if self._has_looked or not dist.is_available() or not dist.is_initialized():
            return
        self._has_looked = True
        if (ranks := dist.get_world_size()) > 1:
            _log.warning(
                "each of the %d ranks of this background waits for its own device, and "
                "in collectives for the others, which takes long and may keep devices "
                "from their foregrounds: give each background one rank",
                ranks,
            )


@final
class _Forward:
    """A forward whose output may have a backward."""

    def __init__(self, label: str) -> None:
        self.label, self.has_backward = label, False
        self.hook: weakref.ref[Any] | None = None
        """The hook that its graph, its only owner, calls as a backward begins."""

    @property
    def has_ended(self) -> bool:
        """Whether its graph has been freed, and had no backward."""
        return not self.has_backward and self.hook is not None and self.hook() is None


@final
class _BackwardEnd:
    """Called as a backward ends, and deleted without a call if it fails."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed = ended, failed
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        self._ended()

    def __del__(self) -> None:
        if not self._is_called:
            self._failed()


def _tensors(output: Any, most: int = _MAX_OUTPUTS) -> list[Tensor]:
    """Return the first tensors in a forward's output."""

    def found(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for one in value:
                yield from found(one)
        elif isinstance(value, Mapping):
            for one in value.values():
                yield from found(one)

    return list(itertools.islice(found(output), most))


def _caller() -> FrameType:
    """Return the call of torch that has called a hook, which calls this."""
    # A variable with this call's own frame would keep the forward's output for long.
    return sys._getframe(2)  # noqa: SLF001


def _has_ended(frame: FrameType | None) -> bool:
    """Return whether a function's call has ended; its local variables are then lost."""
    if frame is None:
        return True
    try:
        frame.clear()
    except RuntimeError:  # it is being executed
        return False
    return True


def _works(isolation: Isolation | None) -> bool:
    """Return whether the foreground comes first without leases, too."""
    return isolation is not None and isolation.works


def _is_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _label(module: nn.Module) -> str:
    # No backward may follow in evaluation, with gradients too: tasks are shorter.
    mode = "" if module.training else " in evaluation"
    if not torch.is_grad_enabled():
        mode = " without gradients"
    return f"{type(module).__qualname__}{mode}"


def lease_script() -> None:
    """Make this process's script a background, if the environment says so.

    Raises:
        SpecError: a setting is invalid.
        BackgroundError: another process is this device's background.
    """
    named = os.environ.get(variable_names.BACKGROUND)
    if not named:
        return
    device = device_name(named)
    pid, _, owned = os.environ.get(variable_names.BACKGROUND_OWNER, "").partition(" ")
    if owned == device and _runs_elsewhere(pid):
        _log.warning(
            "this process takes no leases of %s: the background that has started it "
            "has the device",
            device,
        )
        return
    text = os.environ.get(variable_names.BACKGROUND_MAX_LOSS) or "0.05"
    try:
        max_loss = float(text)
    except ValueError:
        raise SpecError(
            f"{variable_names.BACKGROUND_MAX_LOSS} must be a number, got {text!r}"
        ) from None
    names_of(os.environ.get(variable_names.BACKGROUND_NAMES) or _NAMES)
    named_path = os.environ.get(variable_names.BACKGROUND_COLLOCATION)
    path = Path(named_path).absolute() if named_path else None  # the script may chdir
    if path is not None and path.exists():
        Collocation.load(path)  # not only at the end
    background = Background(device, max_loss=max_loss)
    os.environ[variable_names.BACKGROUND_OWNER] = f"{os.getpid()} {device}"
    leases = ScriptLeases(
        background,
        segments=os.environ.get(variable_names.BACKGROUND_SEGMENTS) or MICRO_BATCH,
    )
    ending = _Ending(leases, background, path)
    atexit.register(ending.run)


def _runs_elsewhere(pid: str) -> bool:
    """Return whether a process other than this one still runs."""
    row = stat_row(int(pid)) if pid.isdigit() and pid != str(os.getpid()) else None
    return row is not None and row[0] not in "ZXx"


def names_of(text: str) -> tuple[str, str]:
    """Return the names of foreground and background from FOREGROUND:BACKGROUND.

    Raises:
        SpecError: the text has another form, or control characters.
    """
    foreground, colon, background = text.partition(":")
    if not (foreground.strip() and colon and background.strip()) or re.search(
        r"[\x00-\x1f\x7f]", text
    ):
        raise SpecError(
            f"--names, or {variable_names.BACKGROUND_NAMES}, must be "
            f"FOREGROUND:BACKGROUND, got {text!r}"
        )
    return foreground, background


def _save_pair(background: Background, path: Path) -> None:
    """Add the measured pair to a file, which is created if needed."""
    names = names_of(os.environ.get(variable_names.BACKGROUND_NAMES) or _NAMES)
    try:
        pair = background.measured_pair(*names)
        if path.exists():
            found = Collocation.load(path).with_row(pair)
        else:
            found = Collocation(rows=(pair,))
        found.save(path)
    except (SpecError, OSError) as error:
        _log.warning("no pair is written to %s: %s", path, error)
        return
    _log.info(
        "%s: %s, loss %.1f %% (quartiles %.1f points apart), share %.2f (%.2f apart)",
        path,
        pair.title,
        100 * pair.loss_ratio,
        100 * pair.loss_spread_ratio,
        pair.share_ratio,
        pair.share_spread_ratio,
    )
    if pair.doubt:
        _log.warning(
            "%s: %s, so other work disturbed the run: measure again on a quiet machine",
            path,
            pair.doubt,
        )


def _known_loss(found: BackgroundStatistics) -> str:
    if found.loss_error is None:
        return "not measured, in so few steps"
    known = f"within {100 * found.loss_error:.1f} points"
    if found.loss_error > _UNCERTAIN:
        known = "uncertain, from few steps"
    return (
        f"{100 * found.loss:.1f} % ({known}) in steps with tasks, which are "
        f"{100 * found.task_steps_ratio:.0f} % of its time"
    )


def _used_s() -> float:
    """Return the processor time of this process and of those that it has started."""
    return time.process_time() + child_processes().used_s


@final
class _Ending:
    """Save and log the results when the script ends."""

    def __init__(
        self, leases: ScriptLeases, background: Background, path: Path | None
    ) -> None:
        self._leases, self._background, self._path = leases, background, path
        self._owner, self._folder = os.getpid(), runtime_folder()
        self._used_s = _used_s()

    def run(self) -> None:
        """Save the pair, close the background and log its last line."""
        if os.getpid() != self._owner:
            return
        background = self._background
        self._leases.close()
        if self._path is not None:
            _save_pair(background, self._path)
        found = background.statistics
        background.close()
        _log.info(
            "background on %s: %d tasks, %.3g s of %.3g s (%.0f %%) on the device; %s",
            background.device_name,
            found.tasks,
            found.running_s,
            found.elapsed_s,
            100 * found.share,
            self._beside(found),
        )
        self._warn_of_no_lease(found)

    def _beside(self, found: BackgroundStatistics) -> str:
        beside = f"no foreground was seen in {self._folder}"
        if found.has_missed_foregrounds and not found.foregrounds:
            beside = (
                "a foreground ran, but this process asked for no lease meanwhile: it "
                "got no processor time beside it and other work, or did not train then"
            )
        if found.foregrounds:
            beside = (
                f"loss of the foreground {_known_loss(found)}; it waited "
                f"{100 * found.idle_ratio:.0f} % of its steps, and tasks ran for "
                f"{100 * found.used_ratio:.0f} % of that time"
            )
        if found.children_s >= _CHILDREN_S:
            beside += (
                f"; processes that it has started used {found.children_s:.3g} s of the "
                "processors without leases"
            )
        return beside

    def _warn_of_no_lease(self, found: BackgroundStatistics) -> None:
        """Warn of a script that computed, but never waited for the device."""
        used_s = _used_s() - self._used_s
        if found.tasks or found.waited_s or used_s < _WITHOUT_S:
            return
        if not _works(self._background.isolation):
            _log.warning(
                "this script took no lease of %s, and computed for %.3g s of processor "
                "time whatever a foreground did: leases are taken for forwards of "
                "torch.nn modules in the main thread. For other work, take them with "
                "`with background.lease():` of a stretto.Background",
                self._background.device_name,
                used_s,
            )
