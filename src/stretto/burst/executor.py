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
import gc
import hashlib
import json
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.burst import hooks, torch_calls
from stretto.burst import parameters as params
from stretto.burst.activation_transfer import ActivationTransfer
from stretto.burst.backward_pass import BackwardPass
from stretto.burst.boundary import in_checkpoint, mark_input, mark_output
from stretto.burst.captures import Captures, Trained, training
from stretto.burst.checks.changes import Changes
from stretto.burst.checks.constant_buffers import ConstantBuffers
from stretto.burst.checks.hook_use import HookUse
from stretto.burst.checks.numbers import number_of
from stretto.burst.checks.optimizer_use import OptimizerUse
from stretto.burst.checks.optimizers import first_difference, kept_outside
from stretto.burst.checks.replicas import Replicas
from stretto.burst.checks.stale_guard import StaleParameterGuard
from stretto.burst.checks.structure import Structure, described_tensors
from stretto.burst.checks.verify_first_step import SEEDS, Trial, require_comparable
from stretto.burst.forward import Forward
from stretto.burst.forward_exchange import ForwardExchange
from stretto.burst.gradient_sync import GradientSync, SyncedLayer
from stretto.burst.held_activations import marked
from stretto.burst.layer_tensors import trained_and_changed
from stretto.burst.ownership import LOOSE, Ownership
from stretto.burst.rank_groups import RankGroups, RankRange
from stretto.burst.rank_meeting import RankMeeting
from stretto.burst.requirements import (
    checked_plan,
    loaded,
    refuse_callers,
    refuse_sparse,
)
from stretto.burst.schedule import ExecutionPlan, rank_ranges_of
from stretto.burst.shadows import Shadows
from stretto.burst.timings import StepClock, Timings
from stretto.burst.torch_seam import TorchSeam
from stretto.burst.tracing.reads import normal_tensors
from stretto.errors import CommTimeout, SpecError, StrettoError
from stretto.runtime.agreement import Agreement, ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from stretto.burst.backward_pass import EndedForward
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.burst.tracing.packing import Results
    from stretto.schema.burst import BurstPlan, LayerTiming

BUCKET_BYTES = 4 * 2**20

_NO_COPY = (
    "a BurstParallel holds connections and can't be copied or pickled: call refresh() "
    "on all ranks, then copy or save its .module, or save full_state_dict()"
)

_EXTRA = "_extra_state"
"""Key under which ``state_dict`` keeps the result of ``get_extra_state``."""

_MOST_SYNCS = 4
"""Number of sets of trained parameters whose buffers are kept: a GAN freezes and
unfreezes one model in every step."""


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
            global batch, whatever the plan.
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
        self._settings = (
            f"batch_norm={batch_norm}, seed={seed}, bucket_bytes={bucket_bytes}, "
            f"lanes={lanes}, verify={verify}"
        )
        self._verify = verify
        self._batch_norm = batch_norm
        self._bucket_bytes = bucket_bytes
        group = process_group or dist.distributed_c10d._get_default_group()  # noqa: SLF001
        held = module.parameters() if isinstance(module, nn.Module) else iter(())
        device = next((p.device for p in held), torch.device("cpu"))
        self._device_used = device
        self._ranks = ranks_of(group, timeout_s=timeout_s)
        self._agreement = Agreement(self._ranks)
        self._meeting = RankMeeting(self._agreement, self._ranks)
        self.plan = self._meeting.succeed_together(
            "begin to build a burst-parallel model",
            lambda: checked_plan(
                module,
                plan,
                (example_inputs, example_kwargs),
                batch_norm,
                bucket_bytes,
                lanes,
            ),
        )
        self._rank_groups = RankGroups(
            self._ranks,
            serial=self._agreement.serial,
            backend=group._get_backend(device).name(),  # noqa: SLF001
            device=device,
            lanes=lanes,
        )
        self._meeting.rank_groups = self._rank_groups
        self._rank_groups.elsewhere = self._agreement.others_wait
        self._clock = StepClock()
        # The last forward's graph may keep the links alive; close connections here.
        ended = weakref.finalize(self, self._rank_groups.close)
        ended.atexit = False
        weak = weakref.ref(self._rank_groups)
        self._agreement.is_over = lambda: _is_ended(weak)
        self._activations = ActivationTransfer(self._rank_groups, self._clock)
        self._timings = Timings(self._clock)
        self._forward = Forward(
            module,
            self._rank_groups,
            self._activations,
            self._clock,
            device=device,
            seed=seed,
        )
        self._ownership = Ownership(self._ranks)
        self._uses = OptimizerUse(self._ranks, self._texts_of("optimizers"))
        self._hooks = HookUse(self._ranks, self._texts_of("hooks"))
        self._constants = ConstantBuffers(self._ranks, self._texts_of("buffers"))
        self._stale_guard = StaleParameterGuard(
            module, self._ranks, self._rank_groups.refusals.tell, self._uses.zeroes
        )
        self._replicas = Replicas(self._ranks)
        self._changes = Changes(self._ranks)
        self._exchange = ForwardExchange(
            self._rank_groups,
            self._clock,
            checks=(
                self._hooks,
                self._constants,
                self._uses,
                self._replicas,
                self._changes,
            ),
        )
        self._seam = TorchSeam(
            module,
            serial=self._agreement.serial,
            ownership=self._ownership,
            rank_groups=self._rank_groups,
            stale_guard=self._stale_guard,
            changes=self._changes,
            uses=self._uses,
        )
        self._backward = BackwardPass(
            rank_groups=self._rank_groups,
            ownership=self._ownership,
            seam=self._seam,
            activations=self._activations,
            stale_guard=self._stale_guard,
            changes=self._changes,
            uses=self._uses,
            hooks=self._hooks,
            timings=self._timings,
            clock=self._clock,
            device=device,
        )
        self._shadows = Shadows(self._backward.gradient_arrived)
        self._structure = Structure(module)
        self._captures = Captures(module, self._ownership, self._stale_guard, device)
        """Empty before the model is set up."""
        self._syncs: OrderedDict[tuple[bool, ...], GradientSync] = OrderedDict()
        self._trained: Trained = ()
        torch_calls.add(self._seam)
        self.register_load_state_dict_pre_hook(_accept_module_names)  # type: ignore[no-untyped-call]
        if example_inputs is not None or example_kwargs is not None:
            with self._informing():
                self._set_up(tuple(example_inputs or ()), example_kwargs or {})

    # Setup.

    def _set_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._captures.use_example(args, kwargs)
        widths: dict[str, RankRange] = {}
        trouble: StrettoError | None = None
        graph = None
        try:
            self._require_own_parameters()
            graph = self._captures.capture_for(self.plan)
            widths = rank_ranges_of(self.plan, graph, self._ranks.size)
            if self._verify:
                require_comparable(graph, self._batch_norm)
        except StrettoError as exc:
            trouble = exc
        self._meet("build a burst-parallel model", graph, trouble)
        assert graph is not None  # noqa: S101
        self._follow(graph, widths)
        roots = dict.fromkeys(widths, 0)
        with self._stale_guard.opened():
            place = "sending the first rank's state"
            params.bring(self._rank_groups, graph, roots, place)
            params.bring_tensors(self._rank_groups, self._ownership.loose, 0, place)
        self._backward.note_left_over(self._structure.parameters)
        if self._verify:
            try:
                self._require_one_process()
            except BaseException:
                self._forward.forget(graph)
                self._captures.forget()  # never train it
                raise

    def _require_one_process(self) -> None:
        """Compute a small step on the ranks and in one process. Collective.

        Raises:
            StrettoError: on all ranks, they differ.
        """
        graph = self._captures.planned
        examples = self._captures.example_tensors()
        own = [node for node in graph.nodes if self._ownership.runs(node.name)]

        def run(rows: Tensor) -> Tensor:
            execution = self._captures.execution_plan(graph, self._trained)
            return self._through_layers(execution, rows, None)

        for seed in SEEDS:
            with training(self.module), self._stale_guard.opened():
                trial = Trial(self.module, graph, own, self._rank_groups, seed)
                mine = trial.difference(examples, self._forward.draws, run)
            self._stale_guard.is_stale = False  # all values are restored
            self._changes.reset()
            self._uses.cut_short()
            texts = self._meeting.gather("verify a burst-parallel model", mine)
            rank, text = next(((i, t) for i, t in enumerate(texts) if t), (0, ""))
            if not text:
                return
        raise StrettoError(
            f"verify=True found that the first step of this plan differs from one "
            f"process: {text} on {self._ranks.name(rank)}. Train "
            f"{type(self.module).__name__} with DistributedDataParallel, and report "
            "the model to stretto: its capture is wrong"
        )

    def _require_own_parameters(self) -> None:
        """Reject parameters that another burst model keeps on some ranks only.

        A model over the same module is one that this one replaces.
        """
        is_whole = all(entry.gpus == self._ranks.size for entry in self.plan.layers)
        names = {id(p): name for name, p in self.module.named_parameters()}

        def shared() -> str | None:
            for other in torch_calls.models():
                if other.module is not self.module and not (
                    is_whole and other.ownership.is_whole()
                ):
                    for parameter in other.module.parameters():
                        if id(parameter) in names and other.ownership.holds(parameter):
                            return names[id(parameter)]
            return None

        if shared() is None:
            return
        gc.collect()  # the other may be waiting for it
        if (name := shared()) is not None:
            raise SpecError(
                f"parameter {name!r} also belongs to another BurstParallel model, "
                "whose plan keeps it on some ranks: build one model that holds both "
                "and returns both outputs, or delete the other model first"
            )

    def _meet(
        self,
        purpose: str,
        graph: LayerGraph | None,
        trouble: StrettoError | None,
        *,
        more: str = "",
    ) -> None:
        """Require that all ranks pass the same model, plan and settings."""
        self._meeting.require_same_model(
            purpose,
            graph=graph,
            trained=sum(p.requires_grad for p in self.module.parameters()),
            held=described_tensors(self.module),
            plan=_digest(self.plan),
            settings=f"{self._settings}, timeout_s={self._ranks.timeout_s:g}{more}",
            trouble=trouble,
        )

    def _follow(self, graph: LayerGraph, widths: dict[str, RankRange]) -> None:
        """Run these layers on these ranks from now on."""
        refuse_sparse(graph)
        self._exchange.forget_schedules()
        for old in self._captures:
            self._forward.forget(old)
        self._captures.follow(graph, widths)
        self._structure = Structure(self.module)
        parameters = self._structure.parameters
        self._ownership.assign(graph, widths, (p for _, p in parameters))
        self._backward.follow(parameters)
        loose = self._ownership.loose
        self._rank_groups.open(
            [*widths.values(), *([self._ownership.everywhere] if loose else [])]
        )
        self._forward.prepare(graph, widths, self._batch_norm)
        self._replicas.watch(graph, widths)
        self._constants.watch(graph)
        self._changes.reset(is_on=not self._ownership.is_whole())
        self._uses.reset(
            parameters, self._ownership.runs_parameter, is_on=self._changes.is_on
        )
        runs = self._ownership.runs
        layers = [(n.module, runs(n.name)) for n in graph.nodes]
        self._hooks.watch(self.module, parameters, layers)
        changed = {n.name: trained_and_changed(n) for n in graph.nodes}
        self._stale_guard.runs(
            [
                *(t for n in graph.nodes if runs(n.name) for t in changed[n.name]),
                *loose,
            ],
            [(name, each) for name, each in changed.items() if not runs(name)],
        )
        self._syncs.clear()
        self._shadows.forget()
        self._use_trained(self._structure.trained())

    def _use_trained(self, trained: tuple[bool, ...]) -> None:
        """Update which parameters need a gradient; local to this rank."""
        if self._backward.sync is not None:
            changed = "parameters were frozen or unfrozen"
            self._backward.sync.require_nothing_kept(changed)
        self._trained = trained
        self._use_shadows()
        if trained not in self._syncs:
            self._syncs[trained] = self._make_sync(self._captures.planned)
            while len(self._syncs) > _MOST_SYNCS:
                self._syncs.popitem(last=False)
        self._syncs.move_to_end(trained)
        self._backward.use(self._syncs[trained], trained)

    def _use_shadows(self) -> None:
        """Let every capture's layers compute with shadows of their parameters.

        Captures share the model's submodules, but each holds the parameters that its
        operations read directly.
        """
        self._shadows.use_for(
            part
            for graph in self._captures
            for node in graph.nodes
            if self._ownership.includes(self._captures.widths_in(graph)[node.name])
            for part in node.module.modules()
        )

    def _make_sync(self, graph: LayerGraph) -> GradientSync:
        widths = self._ownership.widths
        layers = [
            _synced(node.name, widths[node.name], node.module.parameters())
            for node in graph.nodes
            if self._ownership.runs(node.name)
        ]
        everywhere = self._ownership.everywhere
        layers.append(_synced(LOOSE, everywhere, self._ownership.loose))
        return GradientSync(
            self._rank_groups,
            self._clock,
            self._shadows,
            layers,
            self._hooks,
            bucket_bytes=self._bucket_bytes,
        )

    def _graph_now(self) -> LayerGraph:
        """Return the capture for the current modes; local to this rank."""
        graph = self._captures.current()
        if graph is None:
            graph = self._captures.add(self._forget)
            widths = self._captures.widths_in(graph)
            self._forward.prepare(graph, widths, self._batch_norm)
            self._use_shadows()
        return graph

    def _forget(self, graph: LayerGraph) -> None:
        self._forward.forget(graph)
        self._exchange.forget_schedules()

    def _trouble(self) -> StrettoError | None:
        """Return the reason why the model can't run now."""
        changed = self._structure.changed()
        if changed is None:
            return None
        how, so = "replaced or moved", "still uses the old one"
        if self._structure.lacked(changed):
            how, so = "added", "does not train it"
        return StrettoError(
            f"{changed!r} was {how} after the burst model was built, which {so}: build "
            "BurstParallel again after changing the module"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Change parameters' types or devices; what changed ends the model's use."""
        with self._stale_guard.opened():  # converting is not reading
            parent: Any = super()
            return parent._apply(fn, recurse)  # noqa: SLF001

    # Running.

    # torch.compile runs the model uncompiled.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for this rank's share of the global batch.

        Raises:
            SpecError: a sample has another shape or type than the example's.
            RankDisagreement: ranks called in different modes, or one had invalid input.
            CommTimeout: a rank was lost, or stopped with an error of its own.
        """
        with self._informing():
            return self._forwarded(args, kwargs)

    @contextlib.contextmanager
    def _informing(self) -> Iterator[None]:
        """Inform ranks that wait for this one of an error that ends its call."""
        try:
            yield
        except Exception as exc:
            if self._rank_groups.failures.error is None:
                self._rank_groups.refusals.tell(exc)
            raise

    def _forwarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rank_groups.failures.error is not None:
            raise self._rank_groups.failures.error
        if in_checkpoint():
            raise StrettoError(
                "a burst model can't run again inside a backward, so it can't be "
                "wrapped in torch.utils.checkpoint: checkpoint modules inside the model"
            )
        refuse_callers(self, args, kwargs)
        with self._hooks.observed():
            args, kwargs = hooks.before(self.module, args, kwargs)
        with normal_tensors():
            execution, trouble = self._ready_plan(args, kwargs)
        batch, odd = self._packed(execution.graph, args, kwargs)
        trouble = trouble or odd
        if self._timings.is_on:
            self._clock.other()
        output = self._through_layers(execution, batch, trouble)
        results = execution.graph.results
        hook_of = None
        if results.behind is not None:
            watch = self._backward.reached.watch(results)
            hook_of = watch if results.differs else None
        found = results.unpack(output, hook_of)
        with self._hooks.observed():
            return hooks.after(self.module, args, kwargs, found)

    def _ready_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ExecutionPlan, StrettoError | None]:
        """Return the execution of the next forward, and the reason if it can't run."""
        if not self._captures:
            self._set_up(args, kwargs)
        trouble = self._trouble()
        if trouble is None and (trained := self._structure.trained()) != self._trained:
            self._use_trained(trained)
        if trouble is None:
            try:
                graph = self._graph_now()
                return self._captures.execution_plan(graph, self._trained), None
            except StrettoError as exc:
                trouble = exc
        planned = self._captures.planned
        return self._captures.execution_plan(planned, self._trained), trouble

    def _through_layers(
        self, execution: ExecutionPlan, batch: Tensor, trouble: StrettoError | None
    ) -> Tensor:
        """Return the layers' output for this rank's packed rows, ready for backward."""
        self._backward.cut_short()
        self._rank_groups.refusals.next_step()
        self._activations.settle()
        with normal_tensors():
            self._constants.follow(execution.graph)
            layouts, input_needs = self._exchange.exchange(
                execution.graph,
                batch,
                is_training=self.module.training,
                step=self._forward.draws.step,
                trained=number_of(bytes(self._trained)),
                trouble=trouble,
            )
            # Buffers such as running statistics change without a backward.
            if self.module.training:
                self._stale_guard.changed()
            with self._rank_groups.inside_step(), self._stale_guard.opened():
                execution.graph.require_count(layouts.num_samples)
                schedule = self._exchange.schedule(execution, layouts)
        grad = torch.is_grad_enabled()
        with (
            self._rank_groups.inside_step(),
            self._stale_guard.opened(),
            self._shadows.in_place(),
            self._hooks.observed(),
            marked(
                self.module, self._hooks.with_forward_hooks(), batch.grad_fn
            ) as has_hooks,
        ):
            if has_hooks:
                torch_calls.look_before_backward()
            output = self._forward(
                execution,
                schedule,
                batch,
                input_needs=input_needs,
                stamp=self._timings.is_on,
            )
        self._hooks.forward_ended()
        if grad and output.requires_grad:
            ended = self._backward.forward_ended(
                execution.graph.results, layouts.shares
            )
            output = mark_output(
                output,
                ended.shares[self._ranks.rank],
                partial(self._output_backward, ended),
                [p for p in self._backward.own_parameters() if p.requires_grad],
                is_apart=_is_taken_apart(execution.graph.results, output),
            )
        if self._timings.is_on:
            self._clock.other()
            self._timings.forward_ended(
                {
                    step.node.name: len(layouts.samples(step.width)[self._ranks.rank])
                    for step in execution.layers
                }
            )
        return output

    def _packed(
        self, graph: LayerGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, StrettoError | None]:
        """Return the input as one tensor; a scalar and the error if it is invalid.

        Each input tensor is marked separately: one may come from another burst model
        while another is a leaf.
        """
        try:
            marked = graph.arguments.mapped(
                lambda rows: mark_input(rows, self._ranks.size), args, kwargs
            )
            return graph.arguments.pack(*marked), None
        except StrettoError as exc:
            return torch.zeros(()), exc

    def _output_backward(self, forward: EndedForward, grad: Tensor) -> None:
        """Begin a backward; a loss that waits for it keeps the model alive."""
        self._backward.output_arrived(forward, grad)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the next backward outside sends them.

        Samples still move between layers. If parameters have hooks, which must see each
        gradient, gradients are sent here too.
        """
        sync = self._backward.sync
        if sync is None:
            raise StrettoError("no_sync needs example_inputs, or a first forward")
        sync.is_on = False
        try:
            yield
        finally:
            assert self._backward.sync is not None  # noqa: S101
            self._backward.sync.is_on = True

    # Parameters.

    @normal_tensors()
    def refresh(self, *optimizers: Optimizer) -> None:
        """Give this rank the parameters and buffers of layers that it does not run.

        Every rank must call it, after the optimizer's step. If optimizers are passed,
        their states are sent too, so that ``optimizer.state_dict()`` is complete.
        """
        if not self._captures:
            return
        self._meet_to_refresh(optimizers)
        self._require_equal_copies()
        if optimizers:
            self._require_nothing_else(optimizers)
        roots = {name: first for name, (first, _) in self._ownership.widths.items()}
        self._bring(roots, optimizers, "bringing parameters")
        self._stale_guard.refreshed(optimizers)

    def _meet_to_refresh(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Check that all ranks make this call before anything is sent. Collective.

        Gloo ends the process if one rank's message has another size than its peer's,
        such as those of a forward and a refresh.

        Raises:
            CommTimeout: some ranks make another call.
            RankDisagreement: ranks pass different numbers of optimizers.
        """
        if self._ranks.size == 1:
            return
        if self._rank_groups.failures.error is not None:
            raise self._rank_groups.failures.error
        self._rank_groups.refusals.withdraw()
        purpose = f"refresh a burst model with {len(optimizers)} optimizers"
        # States are sent by parameter, so each optimizer must hold the same ones.
        held = [
            sum(len(group["params"]) for group in optimizer.param_groups)
            for optimizer in optimizers
        ]
        counts = ", ".join(map(str, held)) or "none"
        try:
            values = {"the optimizers' parameters": counts}
            if (error := self._meeting.difference(purpose, values)) is not None:
                raise error
        except CommTimeout as exc:
            self._rank_groups.end(
                f"{exc} Every rank must call refresh() and full_state_dict(), as "
                "often and in the same place: ranks make different calls"
            )
            assert self._rank_groups.failures.error is not None  # noqa: S101
            raise self._rank_groups.failures.error from None

    def _bring(
        self, roots: dict[str, int], optimizers: tuple[Optimizer, ...], place: str
    ) -> None:
        graph = self._captures.planned
        with self._stale_guard.opened():
            params.bring(self._rank_groups, graph, roots, place)
            params.bring_states(
                self._rank_groups, graph, roots, optimizers, self._device_used
            )

    def _bring_gradients(self, roots: dict[str, int]) -> None:
        with self._stale_guard.opened():
            params.bring_gradients(self._rank_groups, self._captures.planned, roots)

    def _require_equal_copies(self) -> None:
        """Compare a sample of every parameter that several ranks hold. Collective.

        Also compare the factors of gradients since the last forward, the use of
        optimizers, hooks and buffers.
        """
        if self._ranks.size == 1:
            return
        parts = (
            (self._hooks.next_values(), self._hooks.require_equal),
            (self._constants.next_values(), self._constants.require_equal),
            (self._uses.next_values(), self._uses.require_equal),
            (self._replicas.all_values(), self._replicas.require_all_equal),
            (self._changes.next_values(), self._changes.require_equal),
        )
        with self._rank_groups.guard("comparing the ranks' copies"):
            rows = self._rank_groups.exchange([n for part, _ in parts for n in part])
        for part, require in parts:
            require([row[: len(part)] for row in rows])
            rows = [row[len(part) :] for row in rows]

    def _texts_of(self, what: str) -> Callable[[str], list[str]]:
        """Return a collective that returns every rank's text on its optimizers, say."""
        return partial(
            self._meeting.gather, f"compare {what}", place=f"comparing {what}"
        )

    def _require_nothing_else(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Require that optimizers differ by rank only in their ``state``. Collective.

        Raises:
            StrettoError: on all ranks, naming what differs.
        """
        if self._ranks.size == 1:
            return
        with self._stale_guard.opened():
            mine = json.dumps(kept_outside(optimizers))
        place = "comparing what optimizers keep"
        texts = self._meeting.gather("compare what optimizers keep", mine, place=place)
        found = first_difference([json.loads(text) for text in texts])
        if found is None:
            return
        raise StrettoError(
            f"{found[0]} differs between {self._ranks.name_all((0, found[1]))}: only "
            "the values in optimizer.state are sent to other ranks. Keep it there by "
            "parameter, or set it to the same value on all ranks"
        )

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
        given, purpose = plan, "begin to apply a burst plan"
        self._rank_groups.refusals.withdraw()
        plan = self._meeting.succeed_together(purpose, lambda: loaded(given))
        if not self._captures:
            self.plan = plan
            return
        known = [o for o in self._stale_guard.optimizers() if o not in optimizers]
        every = (*optimizers, *known)
        trouble: StrettoError | None = None
        before, old = self.plan, self._ownership.widths
        graph, widths = self._captures.planned, old
        self.plan = plan
        try:
            assert self._backward.sync is not None  # noqa: S101
            self._backward.sync.require_nothing_kept("apply_plan was called")
            graph = self._captures.capture_for(plan)
            widths = rank_ranges_of(plan, graph, self._ranks.size)
        except StrettoError as exc:
            trouble = exc
        try:
            more = f", {len(every)} optimizers"
            self._meet("apply a burst plan", graph, trouble, more=more)
            if every:
                self._require_nothing_else(every)
        except StrettoError:
            self.plan = before
            raise
        names = self._captures.planned
        same = [n.name for n in names.nodes] == [n.name for n in graph.nodes]
        if not same:  # other layers are joined: send everything, by the old plan
            roots = {name: first for name, (first, _) in old.items()}
            self._bring(roots, every, "bringing parameters")
            self._bring_gradients(roots)
        self._follow(graph, widths)
        if same:
            grown = {
                name: old[name][0]
                for name, (first, width) in widths.items()
                if first < old[name][0] or first + width > sum(old[name])
            }
            self._bring(grown, every, "bringing parameters")
            self._bring_gradients(grown)
        for node in graph.nodes:
            if not self._ownership.runs(node.name):
                for parameter in node.module.parameters():
                    parameter.grad = None

    @normal_tensors()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm together is at most ``max_norm``.

        The same as `torch.nn.utils.clip_grad_norm_` on ``parameters()``. Every rank
        must call it. Returns the norm before scaling.
        """
        if not self._captures:
            raise StrettoError("there are no gradients before the first forward")
        held = list(self.module.parameters())
        self._seam.look_at_gradients()
        self._seam.clips(max_norm)
        total = torch_calls.joint_norm(held, [self._seam], float(norm_type))
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._seam.scale_gradients(factor)
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
        if not self._captures:
            raise StrettoError("there are no gradients before the first forward")
        held = list(self.module.parameters())
        return torch_calls.joint_norm(held, [self._seam], float(norm_type))

    def __deepcopy__(self, _memo: Any) -> Any:
        raise StrettoError(_NO_COPY)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise StrettoError(_NO_COPY)

    # Measurement.

    def measure(self, steps: int) -> None:
        """Time layers in the next ``steps`` steps, see `measured` and `waiting`."""
        if steps < 1:
            raise SpecError(f"steps must be >= 1, got {steps}")
        self._timings.start(steps)

    def measured(self) -> list[LayerTiming]:
        """Return each layer's median times on this rank, for the layers it runs."""
        return self._timings.layers()

    def waiting(self) -> dict[str, float]:
        """Return seconds of a measured step in which this rank had nothing to compute.

        By kind of wait, medians; ``total`` is the median of their sum.
        """
        return self._timings.waiting()

    @property
    def widths(self) -> dict[str, RankRange]:
        """Ranks of each layer: first and number. Empty before the first forward."""
        return dict(self._ownership.widths)


def _is_ended(rank_groups: weakref.ref[RankGroups]) -> bool:
    found = rank_groups()
    return found is not None and found.failures.error is not None


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


def _synced(
    layer: str, width: RankRange, parameters: Iterable[nn.Parameter]
) -> SyncedLayer:
    trained = tuple(p for p in parameters if p.requires_grad)
    return SyncedLayer(name=layer, width=width, parameters=trained)


def _is_taken_apart(results: Results, output: Tensor) -> bool:
    """Return whether `Results.unpack` copies every tensor out of a packed output."""
    packing = results.packing
    return (
        packing is not None
        and not packing.is_one
        and not any(
            output[:, part.start : part.start + part.length].is_contiguous()
            for part in packing.parts
        )
    )


def _digest(plan: BurstPlan) -> str:
    text = repr((plan.profile_digest, plan.gpus, plan.layers))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
