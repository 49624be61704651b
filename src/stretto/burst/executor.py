"""`BurstParallel`: train a module with each layer on as many ranks as its plan says.

# Note [How a rank's loss counts]
Each rank calls the model with its share of the global batch and computes the mean loss
over that share, as with DDP. If rank r has n_r of N samples, the gradient of its output
is multiplied by n_r / N (`boundary.mark_output`), and each layer's gradients are added
over its ranks. The sum is the gradient of the mean loss over all N samples, for any
shares. The loss's direct use of a parameter is weighted in the same way.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.background.named_device import open_named
from stretto.burst import hooks, torch_calls
from stretto.burst.boundary import in_checkpoint, mark_input, mark_output, plain
from stretto.burst.captures import training
from stretto.burst.checks.joined_calls import CLIP
from stretto.burst.checks.verify_first_step import SEEDS, SmallStep
from stretto.burst.held_activations import marked
from stretto.burst.parts import BurstSettings, parts_of
from stretto.burst.plan_change import PlanChange
from stretto.burst.plan_follower import PlanFollower
from stretto.burst.rank_meeting import RankMeeting
from stretto.burst.requested_plans import RequestedPlans
from stretto.burst.requirements import (
    checked_plan,
    number,
    refuse_callers,
    require_count,
    require_group,
    require_optimizers,
)
from stretto.burst.tracing.reads import normal_tensors, uncached_parametrizations
from stretto.errors import SpecError, StrettoError
from stretto.planners.burst.simulated import simulate
from stretto.runtime.agreement import Agreement, ranks_of
from stretto.schema import Cluster
from stretto.schema.burst import LayerProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from stretto.background.windows import Window
    from stretto.burst.backward_pass import EndedForward
    from stretto.burst.rank_groups import RankRange
    from stretto.burst.schedule import ExecutionPlan
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.burst.tracing.packing import PackedResults
    from stretto.runtime.agreement import Ranks
    from stretto.schema.burst import BurstPlan, LayerTiming

BUCKET_BYTES = 4 * 2**20

_NO_COPY = (
    "a BurstParallel holds connections and can't be copied or pickled: call refresh() "
    "on all ranks, then copy or save its .module, or save full_state_dict()"
)

_EXTRA = "_extra_state"
"""Key under which ``state_dict`` keeps the result of ``get_extra_state``."""


@final
class BurstParallel(nn.Module):
    """A module whose layers run on the ranks that a `BurstPlan` assigns to them.

    Use it like DDP: each rank passes its share of the global batch, gets the outputs of
    these samples and computes the mean loss over them. Shares may differ and may be
    empty. After ``backward()`` a rank has gradients of the layers that it runs: those
    of the mean loss over the global batch. Gradients of other layers are ``None``, and
    optimizers skip them. Every rank must call forward and backward equally often.

    Args:
        module: takes and returns tensors with a row for each sample.
        plan: made for this module's layers by `stretto burst plan`, or its file.
        example_inputs: ``forward``'s arguments, of which only shapes and types matter;
            ``None``: those of the first forward.
        example_kwargs: further arguments of ``forward``, by name.
        process_group: the ranks; ``None``: all of the job.
        batch_norm: ``"sync"``: statistics of all samples, as one process computes
            them. ``"local"``: of each rank's own samples, which is a different
            computation for every plan; running statistics are those of a layer's first
            rank.
        seed: dropout masks depend on it, the step, and a sample's number in the
            global batch, whatever the plan. A forward from an earlier state of the
            ranks' generators repeats that step's masks.
        timeout_s: how long to wait for another rank; ``None``: as the process group.
        bucket_bytes: bytes of gradients sent together.
        lanes: number of connections that send gradients at the same time.
        verify: before training, compute one small step with random rows on the ranks
            and in one process, and compare outputs, gradients and buffers. It takes
            about two steps' time and a copy of the module's memory on each rank.

    Raises:
        PlanMismatch: the plan is for another model or for more ranks.
        StrettoError: on all ranks, the step of ``verify`` differs from that of one
            process.
        RankDisagreement: ranks passed different models, plans or settings.
        SpecError: the module can't be split into layers, or an argument is invalid.
    """

    @normal_tensors()
    def __init__(
        self,
        module: nn.Module,
        plan: BurstPlan | str | Path,
        *,
        example_inputs: tuple[Any, ...] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        batch_norm: str = "sync",
        seed: int = 0,
        timeout_s: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        lanes: int = 1,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._is_called = False
        """Whether `forward` is called with hooks of all modules."""
        open_named()
        group, ranks, trouble = _ranks_to_meet(process_group, timeout_s)
        agreement = Agreement(ranks)
        meeting = RankMeeting(agreement, ranks)
        settings = BurstSettings(
            batch_norm=batch_norm,
            seed=seed,
            bucket_bytes=bucket_bytes,
            lanes=lanes,
            verify=verify,
        )
        has_example = example_inputs is not None or example_kwargs is not None
        given = "example inputs" if has_example else "none"
        checked = meeting.succeed_together(
            "begin to build a burst-parallel model",
            lambda: checked_plan(
                module, plan, (example_inputs, example_kwargs), settings, trouble
            ),
            {"some ranks passed example inputs, others none": given},
        )
        self._parts = parts_of(module, settings, group, ranks, agreement, meeting)
        # The last forward's graph may keep the links alive; close connections here.
        ended = weakref.finalize(self, self._parts.rank_groups.close)
        ended.atexit = False
        self._follower = PlanFollower(checked, self._parts)
        self._plan_change = PlanChange(self._parts, self._follower)
        self._requested_plans = RequestedPlans(self._parts)
        torch_calls.add(self._parts.seam)
        self.register_load_state_dict_pre_hook(_accept_module_names)  # type: ignore[no-untyped-call]
        if has_example:
            with self._informing():
                self._set_up(tuple(example_inputs or ()), example_kwargs or {})

    @property
    def plan(self) -> BurstPlan:
        """The plan that the model follows."""
        return self._follower.plan

    @property
    def widths(self) -> dict[str, RankRange]:
        """Ranks of each layer: first and number. Empty before the first forward."""
        return dict(self._parts.ownership.widths)

    # Setup.

    def _set_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._follower.set_up(args, kwargs)
        if self._parts.settings.verify:
            captures = self._parts.captures
            try:
                self._require_one_process()
            except BaseException:
                self._parts.forward.forget(captures.planned)
                captures.forget()  # never train it
                raise

    def _require_one_process(self) -> None:
        """Compute a small step on the ranks and in one process. Collective.

        Raises:
            StrettoError: on all ranks, they differ.
        """
        parts = self._parts
        graph = parts.captures.planned
        examples = parts.captures.example_tensors()
        own = [node for node in graph.nodes if parts.ownership.runs(node.name)]

        def run(rows: Tensor) -> Tensor:
            return self._through_layers(self._follower.planned_execution(), rows, None)

        for seed in SEEDS:
            with training(self.module), parts.stale_guard.opened():
                trial = SmallStep(self.module, graph, own, parts.rank_groups, seed)
                mine = trial.difference(examples, parts.forward.draws, run)
            parts.stale_guard.is_stale = False  # all values are restored
            parts.changes.reset()
            parts.uses.cut_short()
            texts = parts.meeting.gather("verify a burst-parallel model", mine)
            rank, text = next(((i, t) for i, t in enumerate(texts) if t), (0, ""))
            if not text:
                return
        raise StrettoError(
            f"verify=True found that the first step of this plan differs from one "
            f"process: {text} on {parts.ranks.name(rank)}. Train "
            f"{type(self.module).__name__} with DistributedDataParallel, and report "
            "the model to stretto: its capture is wrong"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Change parameters' types or devices; what changed ends the model's use."""
        with self._parts.stale_guard.opened():  # converting is not reading
            parent: Any = super()
            return parent._apply(fn, recurse)  # noqa: SLF001

    # Running.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` with this model's own hooks.

        Hooks of all modules get the user's module: they may ask for its class.
        """
        if not hooks.has_of_all() or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*args, **kwargs)
        self._is_called = True
        args, kwargs = hooks.before(self, args, kwargs)
        return hooks.after(self, args, kwargs, self.forward(*args, **kwargs))

    # torch.compile runs the model uncompiled.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for this rank's share of the global batch.

        Raises:
            SpecError: a sample has another shape or type than the example's.
            RankDisagreement: ranks called in different modes, or one had invalid input.
            CommTimeout: a rank was lost, or stopped with an error of its own.
        """
        with self._informing(), uncached_parametrizations():
            return self._forwarded(args, kwargs)

    @contextlib.contextmanager
    def _informing(self) -> Iterator[None]:
        """Inform ranks that wait for this one of an error that ends its call."""
        try:
            yield
        except Exception as exc:
            if self._parts.rank_groups.failures.error is None:
                self._parts.rank_groups.refusals.tell(exc)
            raise

    def _forwarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._parts
        if parts.rank_groups.failures.error is not None:
            raise parts.rank_groups.failures.error
        parts.seam.require_in_use()
        if in_checkpoint():
            raise StrettoError(
                "a burst model can't run again inside a backward, so it can't be "
                "wrapped in torch.utils.checkpoint: checkpoint modules inside the model"
            )
        refuse_callers(self, args, kwargs)
        of_all, self._is_called = self._is_called, False
        with parts.hooks.observed():
            args, kwargs = hooks.before(self.module, args, kwargs, of_all=of_all)
            behind = hooks.backward_of_all(self.module) if of_all else None
            if behind is not None:
                args = behind.setup_input_hook(args)
        with normal_tensors():
            if not parts.captures:
                self._set_up(args, kwargs)
            execution, trouble = self._follower.execution_now()
        batch, odd = self._packed(execution.graph, args, kwargs)
        trouble = trouble or odd
        if parts.timings.is_on:
            parts.clock.other()
        output = self._through_layers(execution, batch, trouble)
        results = execution.graph.results
        hook_of = None
        if results.output_parameters is not None:
            watch = parts.backward.reached.watch(results)
            hook_of = watch if results.differs else None
        inputs: list[Tensor] = []
        if results.shows_inputs:
            tensors = execution.graph.arguments.tensors(args, kwargs)
            inputs = [plain(rows) for rows in tensors]
        found = results.unpack(output, hook_of, inputs)
        with parts.hooks.observed():
            found = hooks.after(self.module, args, kwargs, found, of_all=of_all)
            return found if behind is None else behind.setup_output_hook(found)

    def _through_layers(
        self, execution: ExecutionPlan, batch: Tensor, trouble: StrettoError | None
    ) -> Tensor:
        """Return the layers' output for this rank's packed rows, ready for backward."""
        parts = self._parts
        grad = torch.is_grad_enabled()
        if grad:
            parts.clock.marker.begin_step()
        parts.backward.cut_short()
        parts.rank_groups.refusals.next_step()
        parts.activations.finish_sends()
        with normal_tensors():
            parts.constants.follow(execution.graph)
            layouts, input_needs = parts.exchange.exchange(
                execution.graph,
                batch,
                is_training=self.module.training,
                draws=parts.forward.draws,
                is_drawing=parts.forward.draws_in(execution),
                trained=self._follower.trained,
                trouble=trouble,
            )
            # Buffers such as running statistics change without a backward.
            if self.module.training:
                parts.stale_guard.changed()
            with parts.rank_groups.inside_step(), parts.stale_guard.opened():
                execution.graph.require_count(layouts.num_samples)
                schedule = parts.exchange.schedule(execution, layouts)
        with (
            parts.rank_groups.inside_step(),
            parts.stale_guard.opened(),
            parts.shadows.in_place(),
            parts.hooks.observed(),
            marked(
                self.module, parts.hooks.with_forward_hooks(), batch.grad_fn
            ) as has_hooks,
        ):
            if has_hooks:
                torch_calls.look_before_backward()
            output = parts.forward(
                execution,
                schedule,
                batch,
                input_needs=input_needs,
                stamp=parts.timings.is_on,
            )
        parts.hooks.forward_ended()
        if grad and output.requires_grad:
            output = self._with_backward(execution.graph, layouts.shares, output)
        if parts.timings.is_on:
            parts.clock.other()
            parts.timings.forward_ended(
                {
                    step.node.name: len(layouts.samples(step.width)[parts.ranks.rank])
                    for step in execution.layers
                }
            )
        return output

    def _with_backward(
        self, graph: LayerGraph, counts: tuple[int, ...], output: Tensor
    ) -> Tensor:
        """Return an output of a forward with these samples by rank, marked."""
        parts = self._parts
        ended = parts.backward.forward_ended(graph.results, counts, graph.proven)
        is_uneven = len(set(counts)) > 1
        if is_uneven:
            torch_calls.look_before_backward()
        own = [p for p in parts.backward.own_parameters() if p.requires_grad]
        return mark_output(
            output,
            ended.shares[parts.ranks.rank],
            partial(self._output_backward, ended),
            own or [p for p in self.module.parameters() if p.requires_grad],
            is_apart=_is_taken_apart(graph.results, output),
            is_uneven=is_uneven,
        )

    def _packed(
        self, graph: LayerGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, StrettoError | None]:
        """Return the input as one tensor; a scalar and the error if it is invalid.

        Each input tensor is marked separately: one may come from another burst model
        while another is a leaf.
        """
        parts = self._parts
        is_known, known = True, parts.input_classes.known_in(graph)

        def taken(rows: Tensor) -> Tensor:
            nonlocal is_known
            is_known &= type(rows) in known
            return mark_input(rows, parts.ranks.size)

        try:
            marked = graph.arguments.mapped(taken, args, kwargs)
            tensors = graph.arguments.tensors(args, kwargs)
            graph.require_unread_attributes(tensors)
            same = graph.one_tensor_as(tensors)
            if not is_known or not parts.input_classes.is_known(graph, same):
                parts.input_classes.require_no_effect(graph, args, kwargs, same)
            batch = graph.arguments.pack(*marked)
            graph.require_gradients_known(batch)
            graph.require_layout_known(tensors)
        except StrettoError as exc:
            return torch.zeros(()), exc
        return batch, None

    def _output_backward(
        self, forward: EndedForward, grad: Tensor, why_not: str
    ) -> None:
        """Begin a backward; a loss that waits for it keeps the model alive."""
        self._parts.backward.output_arrived(forward, grad, why_not)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the next backward outside sends them.

        Samples still move between layers. If parameters have hooks, which must see each
        gradient, gradients are sent here too.
        """
        backward = self._parts.backward
        if backward.sync is None:
            raise StrettoError("no_sync needs example_inputs, or a first forward")
        backward.sync.is_on = False
        try:
            yield
        finally:
            assert backward.sync is not None  # noqa: S101
            backward.sync.is_on = True

    # Parameters.

    @normal_tensors()
    def refresh(self, *optimizers: Optimizer) -> None:
        """Give this rank the parameters and buffers of layers that it does not run.

        Every rank must call it, after the optimizer's step. If optimizers are passed,
        their states are sent too, so that ``optimizer.state_dict()`` is complete.
        """
        if self._parts.captures:
            self._plan_change.refresh(optimizers)
        else:
            require_optimizers(optimizers)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's complete state; every rank must call it."""
        self.refresh()
        return self.module.state_dict()

    @normal_tensors()
    def apply_plan(self, plan: BurstPlan | str | Path, *optimizers: Optimizer) -> None:
        """Follow another plan from the next forward on; every rank must call it.

        A rank receives the parameters, buffers, gradients and optimizer states of the
        layers that it now runs. This covers the given optimizers and those that have
        taken a step. Only an optimizer's ``state`` is sent; its other values must be
        the same on all ranks. Call it between a backward and the next forward.

        Raises:
            PlanMismatch: it is for another model or more ranks; the old one is kept.
            RankDisagreement: ranks passed different plans or optimizers.
            StrettoError: an optimizer keeps something besides its ``state`` that
                differs by rank, or gradients of `no_sync` were not sent yet; the old
                plan is kept.
        """
        self._plan_change.apply(plan, optimizers)
        self._parts.clock.marker.predict(())  # what was predicted was the old plan's

    def follow_requests(self, *optimizers: Optimizer) -> bool:
        """Follow the plan that a cluster requests, if there is one; see `apply_plan`.

        A job of `stretto cluster` whose file has ``"replan": true`` calls this after
        each ``optimizer.step()``, on every rank, before the next forward. The ranks
        look for requests about once in a second. Elsewhere it does nothing. A plan that
        `apply_plan` would refuse is not used: rank 0 logs why, and training continues.

        Args:
            optimizers: as for `apply_plan`.

        Returns:
            Whether the plan has changed.

        Raises:
            CommTimeout: a rank was lost, or does not call this.
        """
        with self._informing():
            require_optimizers(optimizers)
        return self._requested_plans.follow(
            lambda plan: self.apply_plan(plan, *optimizers)
        )

    @normal_tensors()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm together is at most ``max_norm``.

        The same as `torch.nn.utils.clip_grad_norm_` on ``parameters()``. Every rank
        must call it. Returns the norm before scaling.
        """
        with self._informing():
            max_norm, norm_type = (
                number("max_norm", max_norm),
                number("norm_type", norm_type),
            )
        if not self._parts.captures:
            raise StrettoError("there are no gradients before the first forward")
        held = list(self.module.parameters())
        self._parts.seam.look_at_gradients()
        self._parts.seam.clips(max_norm)
        seams = [self._parts.seam]
        total = torch_calls.joint_norm(held, seams, norm_type, CLIP)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._parts.seam.scale_gradients(factor)
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients of the model; every rank must call it.

        Use it for scaling by hand. A norm over this rank's `.grad` is not the model's:
        other layers' gradients are on other ranks.

        Raises:
            StrettoError: before the first forward.
            SpecError: ``norm_type`` is not above 0.
            CommTimeout: a rank was lost.
        """
        with self._informing():
            norm_type = number("norm_type", norm_type)
        if not self._parts.captures:
            raise StrettoError("there are no gradients before the first forward")
        held = list(self.module.parameters())
        return torch_calls.joint_norm(held, [self._parts.seam], norm_type)

    def __deepcopy__(self, _memo: Any) -> Any:
        raise StrettoError(_NO_COPY)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise StrettoError(_NO_COPY)

    # Measurement.

    def measure(self, steps: int) -> None:
        """Time layers in the next ``steps`` steps, see `measured` and `waiting`."""
        self._parts.timings.start(require_count("steps", steps))

    def measured(self) -> list[LayerTiming]:
        """Return each layer's median times on this rank, for the layers it runs."""
        return self._parts.timings.layers()

    def waiting(self) -> dict[str, float]:
        """Return seconds of a measured step in which this rank had nothing to compute.

        By kind of wait, medians; ``total`` is the median of their sum.
        """
        return self._parts.timings.waiting()

    def predict_windows(
        self, profile: LayerProfile, cluster: Cluster, *, cores: float | None = None
    ) -> tuple[Window, ...]:
        """Predict this rank's idle windows in a step, for a background beside it.

        A `stretto.Foreground` passes them on until the background has seen some steps
        and knows their waits. They are forgotten when the plan changes. Local to this
        rank.

        Args:
            profile: the layers and their times, for which the plan was made.
            cluster: the network, such as that of `stretto.probe`.
            cores: processors that all ranks of an emulated cluster share.

        Returns:
            Windows in seconds from the start of a step, in their order.

        Raises:
            PlanMismatch: the profile is of another model.
            SpecError: the cluster has fewer ranks than the plan.
        """
        _require_kind("profile", profile, LayerProfile)
        _require_kind("cluster", cluster, Cluster)
        if cores is not None and not number("cores", cores) > 0:
            raise SpecError(f"cores must be > 0, got {cores!r}")
        step = simulate(
            profile,
            self.plan,
            cluster,
            bucket_bytes=self._parts.settings.bucket_bytes,
            lanes=self._parts.settings.lanes,
            cores=cores,
        )
        windows = step.windows[self._parts.ranks.rank]
        self._parts.clock.marker.predict(windows)
        return windows


def _require_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise SpecError(f"{name} must be a {kind.__name__}, got {value!r}")


def _accept_module_names(
    burst: nn.Module, state: dict[str, Any], prefix: str, *_more: Any
) -> None:
    """Let ``load_state_dict`` accept `full_state_dict`, with the module's names."""
    inner = burst.get_submodule("module")
    known = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in inner.named_buffers(remove_duplicate=False)}
    known |= {
        f"{name}.{_EXTRA}" if name else _EXTRA for name, _ in inner.named_modules()
    }
    if any(f"{prefix}module.{name}" in state for name in known):
        return
    for name in known:
        if prefix + name in state:
            state[f"{prefix}module.{name}"] = state.pop(prefix + name)


def _is_taken_apart(results: PackedResults, output: Tensor) -> bool:
    """Return whether `PackedResults.unpack` copies every tensor of a packed output."""
    packing = results.packing
    return (
        packing is not None
        and not packing.is_one
        and not any(
            output[:, part.start : part.start + part.length].is_contiguous()
            for part in packing.parts
        )
    )


def _ranks_to_meet(
    given: Any, timeout_s: float | None
) -> tuple[dist.ProcessGroup, Ranks, SpecError | None]:
    """Return the group and its ranks, and the error of an invalid argument.

    The other ranks must learn of it, and count this model as this rank does, so it
    meets them by the defaults.
    """
    default = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    try:
        require_group(given)
        group = given or default
        return group, ranks_of(group, timeout_s=timeout_s), None
    except SpecError as exc:
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise
        group = given if isinstance(given, dist.ProcessGroup) else default
        return group, ranks_of(group, timeout_s=None), exc
