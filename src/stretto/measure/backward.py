"""Measure when gradients become ready and parameters are first used in real steps."""

from __future__ import annotations

import platform
import statistics
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from stretto.autograd_engine import (
    graph_task_id,
    on_accumulated,
    queue_callback,
)
from stretto.errors import SpecError
from stretto.measure.clocks import clock_for
from stretto.measure.eager_hooks import EagerHooks, disable_dynamo, in_eager
from stretto.measure.network import barrier, device_of
from stretto.measure.steady import (
    DEFAULT_MAX_SPREAD_RATIO,
    quartile_distance,
    require_steady,
    spread_ratio,
)
from stretto.schema import TensorSpec, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

DEFAULT_WARMUP = 3
DEFAULT_REPETITIONS = 10


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One step without communication, on one rank."""

    step_s: float
    """From the start of forward to the start of the next, without waiting for ranks."""

    forward_s: float
    """The time of the model's forward alone."""

    backward_s: float

    ready_s: tuple[float, ...]
    """Per parameter, from the start of backward, in the order of the parameters."""

    needed_s: tuple[float, ...]
    """Per parameter, from the start of forward, in the order of the parameters."""


class StepObserver:
    """Observes a model's steps in any training loop, as a context manager.

    A step begins where the model is called with gradients enabled. It ends at the next
    such call after a backward, or at `end_step`. Evaluation under ``torch.no_grad``
    counts toward the step that contains it, so keep it out of the measured steps.

    Backward begins when the gradient of the model's output is ready: the loss, its
    backward, the optimizer and the input pipeline count as time outside backward. In a
    model whose forward runs backward itself, forward ends and backward begins when the
    last module before it has returned, so the loss counts as backward there. Times
    exclude communication only if the model does not communicate: observe the module
    inside a ``DistributedDataParallel``, and run under its ``no_sync``.

        with StepObserver(model) as observer:
            for images, labels in loader:
                loss = criterion(model(images), labels)
                ...
        workload = observer.workload(name="resnet", batch_per_rank=32)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: ProcessGroup | None = None,
        on_step: Callable[[int], None] | None = None,
        parameters: Sequence[tuple[str, nn.Parameter]] | None = None,
        unused: bool = False,
        aside: bool = False,
    ) -> None:
        """Prepare the observer; it observes nothing until the context is entered.

        Args:
            model: The module whose call is a step's forward.
            group: Ranks that begin every step together, so that they load each other
                as they do in training; by default no rank waits for another.
            on_step: Called after each step with the number of whole steps seen.
            parameters: Names and parameters to observe; by default all of the model's
                that require a gradient.
            unused: Whether parameters may get no gradient in a step. DDP marks them as
                ready when the first gradient of the step is.
            aside: Whether the observation must not affect the training. The model then
                gets no hooks of its own (it can be copied and saved meanwhile), the
                observer does not keep it alive, and an error ends the observation and
                is kept in `error`.

        Raises:
            SpecError: the model has no parameter that requires a gradient.
        """
        if parameters is None:
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        else:
            named = list(parameters)
        if not named:
            raise SpecError(
                f"{type(model).__name__} has no parameter that requires a gradient"
            )
        self.model = model
        self.steps: list[ObservedStep] = []
        self.order: tuple[int, ...] = ()
        """Parameters in the order in which they became ready in the last step."""
        self.batch_size: int | None = None
        """First dimension of the first tensor that the model was last called with."""
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._unused = unused
        self._group = group
        self._on_step = on_step
        self._aside = aside
        self.error: Exception | None = None
        """The error that ended an observation ``aside``."""
        self._device = self._parameters[0].device
        self._clock = clock_for(self._device)
        self._mark = self._clock.mark
        self._handles: list[Any] = []
        self._output_hooks: list[Any] = []
        self._owners = self._find_owners()
        self._started: Any = None
        self._reset()

    # -- the context -------------------------------------------------------

    def __enter__(self) -> Self:
        if self._aside:
            self._watch_aside()
        else:
            self._watch_modules()
        for i, parameter in enumerate(self._parameters):
            hook = self._held(StepObserver._became_ready, i)
            self._handles.append(on_accumulated(parameter, hook))
        return self

    def _watch_modules(self) -> None:
        model = self.model
        # Before any other hook of the root, so that their time counts toward its
        # forward.
        self._handles.append(
            model.register_forward_pre_hook(
                in_eager(self._root_called), with_kwargs=True, prepend=True
            )
        )
        returned = in_eager(self._root_returned)
        self._handles.append(model.register_forward_hook(returned))
        returned = in_eager(self._returned)
        for prefix, module in model.named_modules(remove_duplicate=True):
            if module is not model and next(module.parameters(), None) is not None:
                hook = in_eager(self._module_hook(prefix))
                self._handles.append(module.register_forward_pre_hook(hook))
                self._handles.append(module.register_forward_hook(returned))

    def _watch_aside(self) -> None:
        # Hooks of all modules, because one module's own hooks would be copied and saved
        # with it.
        prefixes = {
            id(module): prefix
            for prefix, module in self.model.named_modules(remove_duplicate=True)
            if next(module.parameters(), None) is not None
        }
        self._prefixes = {**prefixes, id(self.model): ""}
        called = self._guarded(StepObserver._any_called)
        returned = self._guarded(StepObserver._any_returned)
        self._handles = [EagerHooks(called, returned)]
        self._end = weakref.finalize(self, _remove, list(self._handles))

    def _held(self, method: Callable[..., None], *first: Any) -> Callable[..., None]:
        """Return `_guarded`'s hook, which Dynamo does not compile."""
        hook = disable_dynamo(self._guarded(method, *first))
        return cast("Callable[..., None]", hook)

    def _guarded(self, method: Callable[..., None], *first: Any) -> Callable[..., None]:
        """Return a hook that keeps nothing alive and, with ``aside``, never raises."""
        mine = weakref.ref(self)

        def hook(*args: Any) -> None:
            self = mine()
            if self is None:
                return
            try:
                method(self, *first, *args)
            except Exception as exc:
                if not self._aside:
                    raise
                self.error = exc
                self.close()

        return hook

    def _any_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        prefix = self._prefixes.get(id(module))
        if prefix == "":
            self._root_called(module, args, {})
        elif prefix is not None and self._begin is not None:
            self._first_use.setdefault(prefix, self._mark())

    def _any_returned(self, module: nn.Module, args: Any, output: Any) -> None:
        prefix = self._prefixes.get(id(module))
        if prefix == "":
            self._root_returned(module, args, output)
        elif prefix is not None:
            self._returned(module, args, output)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop observing. A step in progress is dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._reset()

    def exclude(self, duration_s: float) -> None:
        """Exclude some seconds from the step in progress: a wait for communication."""
        self._excluded_s += duration_s

    @property
    def whole(self) -> bool:
        """Return whether the step in progress has run its backward."""
        return self._backward_end is not None and bool(self._ready_order)

    def begin_step(self) -> None:
        """Begin a step here rather than at the next call of the model."""
        self._finish()
        self._reset()
        if self._group is not None:
            barrier(self._group)
        self._started = self._mark()

    def end_step(self, step_s: float | None = None) -> None:
        """End the step here rather than at the next call of the model.

        ``step_s`` is the step's duration, if it is known better than from the start of
        its forward.
        """
        self._finish(step_s)
        self._reset()
        self._resume()

    # -- hooks -------------------------------------------------------------

    def _reset(self) -> None:
        for handle in self._output_hooks:
            handle.remove()
        self._output_hooks.clear()
        self._begin: Any = None
        self._resumed = False
        """Whether the step began where the one before it ended, within forward."""
        self._last_return: Any = None
        self._forward_end: Any = None
        self._backward_begin: Any = None
        self._backward_end: Any = None
        self._first_use: dict[str, Any] = {}
        self._ready: list[Any] = [None] * len(self._parameters)
        self._ready_order: list[int] = []
        self._callback_queued = False
        self._excluded_s = 0.0
        self._started = None

    def _resume(self) -> None:
        """Begin a step: another backward may follow within the same forward."""
        self._begin = self._first_use[""] = self._mark()
        self._resumed = True

    def _root_called(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.is_grad_enabled():
            return
        if self._clock.is_captured():  # reading an event would end the capture
            self.close()
            return
        if self._begin is not None and not (self._ready_order or self._resumed):
            return  # a second forward before backward: the same step continues
        if not self._resumed:
            self._finish()
        started = self._started
        self._reset()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                self.batch_size = leaf.shape[0]
                break
        if self._group is not None and started is None:
            barrier(self._group)
        self._first_use[""] = self._mark()
        self._begin = started or self._first_use[""]

    def _root_returned(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._begin is None or not torch.is_grad_enabled() or self._ready_order:
            return  # with gradients: the backward was run within this forward
        self._forward_end = self._mark()
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                if self.batch_size is None and leaf.dim() > 0:
                    self.batch_size = leaf.shape[0]
                hook = leaf.register_hook(self._held(StepObserver._backward_began))
                if leaf.is_leaf:  # a parameter or an input, which keeps its hooks
                    self._output_hooks.append(hook)

    def _module_hook(self, prefix: str) -> Callable[..., None]:
        def first_used(_module: nn.Module, _args: Any) -> None:
            if self._begin is not None and prefix not in self._first_use:
                self._first_use[prefix] = self._mark()

        return first_used

    def _returned(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Record the last module that returned before backward."""
        if (
            self._begin is not None
            and not self._ready_order
            and torch.is_grad_enabled()
            and graph_task_id() == -1  # not recomputed within backward
        ):
            self._last_return = self._mark()

    def _backward_began(self, _gradient: torch.Tensor) -> None:
        if self._begin is None:
            return
        if self._backward_begin is None:
            self._backward_begin = self._mark()
        self._queue_end()

    def _queue_end(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            # DDP itself uses this to detect the end of backward.
            queue_callback(self._held(StepObserver._backward_ended))

    def _backward_ended(self) -> None:
        self._callback_queued = False
        if self._begin is not None:
            self._backward_end = self._mark()

    def _became_ready(self, i: int, _parameter: torch.Tensor) -> None:
        if self._begin is None:
            return
        if self._ready[i] is None:
            self._ready_order.append(i)
        self._ready[i] = self._mark()
        self._queue_end()

    # -- a step's record ---------------------------------------------------

    def _find_owners(self) -> list[tuple[str, ...]]:
        """Return, for each parameter, the modules that own it under any name.

        The root stands for a parameter that no module owns: forward may put it in
        place for each call only, or it was replaced since the model was wrapped.
        """
        owners: dict[int, list[str]] = {id(p): [] for p in self._parameters}
        for prefix, module in self.model.named_modules(remove_duplicate=True):
            for parameter in module.parameters(recurse=False):
                if id(parameter) in owners:
                    owners[id(parameter)].append(prefix)
        return [tuple(owners[id(p)]) or ("",) for p in self._parameters]

    def _first_use_of(self, i: int) -> list[Any]:
        """Return an owner's earliest start, or that of its nearest called parent."""
        marks = []
        for owner in self._owners[i]:
            prefix = owner
            while prefix not in self._first_use:
                prefix = prefix.rpartition(".")[0]
            marks.append(self._first_use[prefix])
        return marks

    def _finish(self, step_s: float | None = None) -> None:
        if self._begin is None or not self._ready_order or self._backward_end is None:
            return
        end = self._mark()
        if self._unused:
            first = self._ready[self._ready_order[0]]
            absent = [i for i, moment in enumerate(self._ready) if moment is None]
            self._ready = [
                first if moment is None else moment for moment in self._ready
            ]
            self._ready_order = [*absent, *self._ready_order]
        missing = [
            name
            for name, moment in zip(self._names, self._ready, strict=True)
            if moment is None
        ]
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise SpecError(
                f"{len(missing)} of {len(self._names)} parameters got no gradient in a "
                f"step: {shown}. A plan needs every gradient in every step: freeze "
                "these (requires_grad=False) or use them in the loss"
            )
        seconds = self._clock.seconds
        begin = self._begin
        forward_end = self._forward_end or self._last_return or begin
        backward_begin = self._backward_begin or forward_end
        self.order = tuple(self._ready_order)
        self.steps.append(
            ObservedStep(
                step_s=(seconds(begin, end) if step_s is None else step_s)
                - self._excluded_s,
                forward_s=seconds(begin, forward_end),
                backward_s=seconds(backward_begin, self._backward_end),
                ready_s=tuple(
                    max(0.0, seconds(backward_begin, moment)) for moment in self._ready
                ),
                needed_s=tuple(
                    min(seconds(begin, mark) for mark in self._first_use_of(i))
                    for i in range(len(self._names))
                ),
            )
        )
        self._begin = None
        if self._on_step is not None:
            self._on_step(len(self.steps))

    # -- the workload ------------------------------------------------------

    def workload(
        self,
        *,
        name: str,
        batch_per_rank: int | None = None,
        warmup: int = DEFAULT_WARMUP,
        group: ProcessGroup | None = None,
        max_spread_ratio: float = DEFAULT_MAX_SPREAD_RATIO,
        rows: Sequence[Sequence[float]] | None = None,
    ) -> Workload:
        """Return the workload of the observed steps: medians over steps.

        With several ranks each step counts as its slowest rank's, tensor by tensor,
        because a collective waits for the slowest.

        Args:
            name: The workload's name.
            batch_per_rank: Samples per step and rank; by default the first dimension
                of the model's first input.
            warmup: Number of first steps to leave out.
            group: Ranks that observed the same steps; all of them must call this.
            max_spread_ratio: Largest accepted distance between the quartiles of the
                time of backward, as a share of its median.
            rows: Results of `row_of`, merged over ranks, to use instead of these steps.

        Raises:
            SpecError: fewer than three steps are left.
            NoisyProfile: the steps differ too much.
        """
        steps = self.steps[warmup:]
        if rows is None:
            rows = self._rows(steps, group)
        if len(rows) < 3:
            raise SpecError(
                f"a workload needs at least 3 steps after {warmup} warm-up steps, but "
                f"{len(self.steps)} were seen in total; train for longer"
            )
        table = _StepTable(rows, len(self._names))
        require_steady(
            "the time of backward",
            table.backward_s,
            max_spread_ratio=max_spread_ratio,
            next_step=(
                "Give this job the machine to itself, pin torch.set_num_threads, or "
                "measure more steps; `--max-spread` accepts more"
            ),
        )
        count = len(self._names)
        tensors = [
            TensorSpec(
                name=self._names[i],
                bytes=self._parameters[i].numel() * self._parameters[i].element_size(),
                dtype=str(self._parameters[i].dtype).removeprefix("torch."),
                ready_s=table.ready_s(i),
                needed_s=table.needed_s(i),
            )
            for i in sorted(
                range(count), key=lambda i: (table.ready_s(i), table.rank(i))
            )
        ]
        forward_s = statistics.median(table.forward_s)
        return Workload(
            name=name,
            framework="pytorch",
            device=_device_name(self._device),
            batch_per_rank=batch_per_rank or self.batch_size or 1,
            forward_s=max(forward_s, max(t.needed_s for t in tensors)),
            backward_s=max(statistics.median(table.backward_s), tensors[-1].ready_s),
            tensors=tuple(tensors),
            provenance={
                "host": platform.node(),
                "torch": torch.__version__,
                "torch_threads": torch.get_num_threads(),
                "ranks": 1 if group is None else dist.get_world_size(group),
                "warmup": warmup,
                "repetitions": len(rows),
                "step_s": statistics.median(table.step_s),
                "outside_s": statistics.median(table.outside_s),
                "outside": "loss, optimizer and input pipeline, part of forward_s",
                "forward_spread_s": quartile_distance(table.forward_s),
                "backward_spread_s": quartile_distance(table.backward_s),
                "backward_spread_ratio": spread_ratio(table.backward_s),
            },
        )

    def _rows(
        self, steps: Sequence[ObservedStep], group: ProcessGroup | None
    ) -> list[list[float]]:
        rows = [self.row_of(step) for step in steps]
        if group is None or len(rows) < 3:
            return rows
        table = torch.tensor(rows, dtype=torch.float64, device=device_of(group))
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
        found: list[list[float]] = table.tolist()
        return found

    def row_of(self, step: ObservedStep) -> list[float]:
        """Return a step as figures of which a group of ranks takes the largest."""
        position = {parameter: place for place, parameter in enumerate(self.order)}
        before_s = max(0.0, step.step_s - step.backward_s)
        return [
            before_s,
            before_s + step.backward_s,
            max(0.0, before_s - step.forward_s),
            *(before_s + value for value in step.ready_s),
            *step.needed_s,
            *(float(position[i]) for i in range(len(self.order))),
        ]


class _StepTable:
    """Return the steps with the times of their slowest rank.

    Every rank's clock starts with its forward. All time outside backward is put before
    backward, so gradient ``i`` is ready at (time outside backward) + ``ready_s[i]``,
    and a collective may begin when the latest rank has it.
    """

    def __init__(self, rows: Sequence[Sequence[float]], tensors: int) -> None:
        self._rows = rows
        self._count = tensors
        self.forward_s = [row[0] for row in rows]
        self.step_s = [row[1] for row in rows]
        self.backward_s = [row[1] - row[0] for row in rows]
        self.outside_s = [row[2] for row in rows]

    def ready_s(self, i: int) -> float:
        return statistics.median(row[3 + i] - row[0] for row in self._rows)

    def needed_s(self, i: int) -> float:
        return statistics.median(row[3 + self._count + i] for row in self._rows)

    def rank(self, i: int) -> float:
        """Return each parameter's position in the order of readiness."""
        return self._rows[-1][3 + 2 * self._count + i]


def profile_model(
    model: nn.Module,
    step: Callable[[], object],
    *,
    name: str | None = None,
    batch_per_rank: int | None = None,
    warmup: int = DEFAULT_WARMUP,
    repetitions: int = DEFAULT_REPETITIONS,
    group: ProcessGroup | None = None,
    max_spread_ratio: float = DEFAULT_MAX_SPREAD_RATIO,
) -> Workload:
    """Measure the workload of a model in real training steps without communication.

    Args:
        model: The module that ``step`` calls and whose gradients count.
        step: Runs one whole step: input, forward, loss, backward, optimizer.
        name: The workload's name, the model's class by default.
        batch_per_rank: As for `StepObserver.workload`.
        warmup: Steps before those that count.
        repetitions: Steps that count, at least 3.
        group: Ranks that all call this; they begin each step together and count as
            their slowest.
        max_spread_ratio: As for `StepObserver.workload`.

    Raises:
        SpecError: a parameter gets no gradient, or there are too few repetitions.
        NoisyProfile: the steps differ too much.
    """
    with StepObserver(model, group=group) as observer:
        for _ in range(warmup + repetitions):
            step()
            observer.end_step()
        if not observer.steps:
            raise SpecError(
                f"no step was seen: the function never called {type(model).__name__} "
                "and then backward on its output"
            )
        return observer.workload(
            name=name or type(model).__name__,
            batch_per_rank=batch_per_rank,
            warmup=warmup,
            group=group,
            max_spread_ratio=max_spread_ratio,
        )


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() or "cpu"
