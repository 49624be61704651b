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
import itertools
import json
import os
import time
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto._version import __version__
from stretto.burst import hooks, torch_calls
from stretto.burst import parameters as params
from stretto.burst.activation_transfer import ActivationTransfer
from stretto.burst.batch_partition import BatchPartition
from stretto.burst.boundary import (
    in_checkpoint,
    mark_input,
    mark_output,
    require_values,
)
from stretto.burst.changes import Changes
from stretto.burst.forward import Forward
from stretto.burst.gradient_sync import GradientSync, SyncedLayer
from stretto.burst.graph import capture, require_module
from stretto.burst.held_activations import kept_behind, marked
from stretto.burst.norm import KINDS
from stretto.burst.optimizer_use import OptimizerUse
from stretto.burst.optimizers import first_difference, kept_outside
from stretto.burst.rank_groups import RankGroups, Width
from stretto.burst.reach import Reached
from stretto.burst.replicas import Replicas
from stretto.burst.schedule import (
    ExecutionPlan,
    execution_plan_of,
    later_widths,
    widths_of,
)
from stretto.burst.separable import why_together
from stretto.burst.shadows import MODEL_GONE, Shadows
from stretto.burst.stale_guard import StaleParameterGuard
from stretto.burst.structure import Structure, number_of
from stretto.burst.timings import StepClock, Timings
from stretto.burst.tracing.reads import Ambient, normal_tensors
from stretto.burst.verify import SEEDS, Trial, require_comparable
from stretto.errors import (
    CommTimeout,
    PlanMismatch,
    RankDisagreement,
    SpecError,
    StrettoError,
)
from stretto.logs import get_logger
from stretto.runtime.agreement import Agreement, ranks_of
from stretto.runtime.torch_compat import without_dynamo
from stretto.schema.burst import BurstPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from stretto.burst.tracing.layers import LayerGraph, LayerNode
    from stretto.burst.tracing.packing import Results
    from stretto.schema.burst import LayerTiming

_log = get_logger(__name__)

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001

BUCKET_BYTES = 4 * 2**20

_LOOSE = "(none)"
"""Takes the place of a layer for parameters that no layer uses."""

_NO_COPY = (
    "a BurstParallel holds connections and can't be copied or pickled: call refresh() "
    "on all ranks, then copy or save its .module, or save full_state_dict()"
)

_MOST_GRAPHS = 8
"""Number of captures to keep: of training, evaluation, with autocast or without."""

_PARALLEL = frozenset(
    (
        *("BurstParallel", "DistributedDataParallel", "DataParallel"),
        *("FullyShardedDataParallel", "FSDPModule"),
    )
)
"""Classes that can't be inside a burst model."""

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
        self.plan = self._together(
            "begin to build a burst-parallel model",
            lambda: _checked(
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
        self._partition = BatchPartition(self._rank_groups, self._clock)
        self._example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._execution_plans: dict[LayerGraph, ExecutionPlan] = {}
        """Empty before the model is set up."""
        self._widths: dict[str, Width] = {}
        self._widths_in: dict[LayerGraph, dict[str, Width]] = {}
        """Ranks of each capture's layers."""
        self._sync: GradientSync | None = None
        self._queued = False
        self._stale_guard = StaleParameterGuard(
            module, self._ranks, self._rank_groups.refusals.tell
        )
        self._replicas = Replicas(self._ranks)
        self._changes = Changes(self._ranks)
        self._uses = OptimizerUse(self._ranks, self._options_of_all)
        self._shadows = Shadows(self._gradient_arrived)
        self._structure = Structure(module)
        self._reached = Reached(self._structure.parameters)
        self._graphs: list[LayerGraph] = []
        """Captures of the model. The first is the plan's; others were made after a
        change of the mode, autocast, or values that its code reads."""

        self._recaptures = 0
        self._patterns: dict[tuple[bool, ...], dict[LayerGraph, ExecutionPlan]] = {}
        self._syncs: OrderedDict[tuple[bool, ...], GradientSync] = OrderedDict()
        self._trained: tuple[bool, ...] | None = None
        self._width_of: dict[int, Width] = {}
        self._layer_of: dict[int, str] = {}
        self._loose: tuple[nn.Parameter, ...] = ()
        self._direct_handles: list[Any] = []
        self._share = 1 / self._ranks.size
        self._is_preparing = False
        """Whether the step that runs only makes an optimizer's state."""
        self._left_over: list[tuple[str, nn.Parameter, Tensor]] = []
        """Gradients from before the model was set up."""
        torch_calls.add(self)
        self.register_load_state_dict_pre_hook(_accept_module_names)  # type: ignore[no-untyped-call]
        if example_inputs is not None or example_kwargs is not None:
            self._set_up(tuple(example_inputs or ()), example_kwargs or {})

    # Setup.

    def _together(self, purpose: str, make: Callable[[], _Made]) -> _Made:
        """Return the result of ``make`` if it fails on no rank. Collective.

        Raises:
            RankDisagreement: it failed on another rank.
        """
        values: dict[str, str] = {}
        trouble: Exception | None = None
        try:
            made = make()
        except Exception as exc:  # noqa: BLE001 - raised below, once others know
            trouble = exc
            values["trouble"] = str(exc) or type(exc).__name__
        if self._ranks.size > 1:
            self._compare(purpose, values, trouble)
        if trouble is not None:
            raise trouble
        return made

    def _compare(
        self, purpose: str, values: Mapping[str, str], trouble: Exception | None
    ) -> None:
        """Compare all ranks. A rank with an error of its own raises nothing here."""
        # There are no connections yet at the first comparison.
        rank_groups: RankGroups | None = vars(self).get("_rank_groups")
        try:
            with contextlib.ExitStack() as stack:
                if rank_groups is not None:
                    what = f"the meeting to {purpose}"
                    stack.enter_context(rank_groups.refusals.waiting(what))
                self._agreement.require_same(purpose, values)
        except RankDisagreement:
            if trouble is None:
                raise
        except CommTimeout as exc:
            known = None if rank_groups is None else rank_groups.failures.error
            raise known or exc from None

    def _set_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._example = args, kwargs
        widths: dict[str, Width] = {}
        trouble: StrettoError | None = None
        graph = None
        try:
            self._require_own_parameters()
            graph = self._capture()
            widths = widths_of(self.plan, graph, self._ranks.size)
            if self._verify:
                require_comparable(graph, self._batch_norm)
        except StrettoError as exc:
            trouble = exc
        self._meet("build a burst-parallel model", graph, self.plan, trouble)
        assert graph is not None  # noqa: S101
        self._follow(graph, widths)
        roots = dict.fromkeys(widths, 0)
        with self._stale_guard.opened():
            place = "sending the first rank's state"
            params.bring(self._rank_groups, graph, roots, place)
            params.bring_tensors(self._rank_groups, self._loose, 0, place)
        self._left_over = [
            (name, p, p.grad)
            for name, p in self._structure.parameters
            if p.grad is not None
        ]
        if self._verify:
            try:
                self._require_one_process()
            except BaseException:
                self._execution_plans = {}  # failed: never train it
                raise

    def _require_one_process(self) -> None:
        """Compute a small step on the ranks and in one process. Collective.

        Raises:
            StrettoError: on all ranks, they differ.
        """
        assert self._example is not None  # noqa: S101
        graph = self._graphs[0]
        args, kwargs = self._example
        examples = graph.arguments.tensors(args, dict(kwargs))
        own = [node for node in graph.nodes if self._runs(node.name)]

        def run(rows: Tensor) -> Tensor:
            return self._through_layers(self._execution_plans[graph], rows, None)

        for seed in SEEDS:
            with self._training(), self._stale_guard.opened():
                trial = Trial(self.module, graph, own, self._rank_groups, seed)
                mine = trial.difference(examples, self._forward.draws, run)
            self._stale_guard.is_stale = False  # all values are restored
            self._changes.reset()
            self._uses.cut_short()
            texts = self._agreement.gather("verify a burst-parallel model", mine)
            rank, text = next(((i, t) for i, t in enumerate(texts) if t), (0, ""))
            if not text:
                return
        raise StrettoError(
            f"verify=True found that the first step of this plan differs from one "
            f"process: {text} on {self._ranks.name(rank)}. Train "
            f"{type(self.module).__name__} with DistributedDataParallel, and report "
            "the model to stretto: its capture is wrong"
        )

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Put the module into train mode temporarily."""
        was = [(part, part.training) for part in self.module.modules()]
        try:
            if not self.module.training:  # as train() would
                for part, _ in was:
                    part.training = True
            yield
        finally:
            for part, flag in was:
                part.training = flag

    def _require_own_parameters(self) -> None:
        """Reject parameters that another burst model keeps on some ranks only.

        A model over the same module is one that this one replaces.
        """
        is_whole = all(entry.gpus == self._ranks.size for entry in self.plan.layers)
        names = {id(p): name for name, p in self.module.named_parameters()}

        def shared() -> str | None:
            for other in torch_calls.models():
                if other.module is not self.module and not (
                    is_whole and other.is_whole()
                ):
                    for parameter in other.module.parameters():
                        if id(parameter) in names and other.owns(parameter):
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

    def _capture(self) -> LayerGraph:
        """Capture the model in train mode, for which the plan is made."""
        assert self._example is not None  # noqa: S101
        with self._training(), self._stale_guard.opened():
            graph = capture(self.module, *self._example)
            return graph.joined([entry.layer for entry in self.plan.layers])

    def _capture_as_is(self, ambient: Ambient) -> LayerGraph:
        """Capture the model in its current modes and state."""
        assert self._example is not None  # noqa: S101
        begin = time.monotonic()
        with self._stale_guard.opened():
            # Low precision hides the differences that the check looks for; the model
            # was already checked without autocast.
            graph = capture(
                self.module,
                *self._example,
                ambient=ambient,
                verify=not ambient.autocast,
            )
        names = [entry.layer for entry in self.plan.layers]
        # There may be fewer layers: some run in training only.
        same = set(names) == {node.name for node in graph.nodes}
        if self.module.training or same:
            try:
                graph = graph.joined(names)
            except PlanMismatch as exc:
                found = (known.outdated() for known in self._graphs)
                changed = next((name for name in found if name), "autocast")
                raise PlanMismatch(
                    f"{changed!r} changed after the burst model was built, and the "
                    "model now has different layers than its plan: make such changes "
                    "before building BurstParallel, and plan again"
                ) from exc
        planned = self._graphs[0]
        widths, unknown = later_widths(graph, planned, self._widths, self._width_of)
        if unknown is not None:
            raise PlanMismatch(self._why_unknown(graph, unknown))
        self._widths_in[graph] = widths
        self._recaptures += 1
        if self._recaptures in (8, 64, 512):
            _log.warning(
                "stretto: the burst model was captured again %d times, the last in "
                "%.2g s, because %r, which its forward reads, had changed: pass values "
                "that change in each step as an input tensor or keep them in a buffer",
                self._recaptures,
                time.monotonic() - begin,
                self._graphs[-1].outdated() or "a mode",
            )
        return graph

    def _why_unknown(self, graph: LayerGraph, name: str) -> str:
        """Return why a layer of a later capture is not in the plan."""
        parameters = graph.by_name[name].module.parameters()
        owners = (self._layer_of.get(id(p)) for p in parameters)
        layer = next((owner for owner in owners if owner is not None), None)
        if layer is None:
            return (
                f"layer {name!r} runs in evaluation only, so it is missing from the "
                "plan: let the module run the same layers in both modes"
            )
        return (
            f"layer {name!r} is part of layer {layer!r} in training, but not in "
            "evaluation, where the module runs fewer operations: operations that share "
            "a parameter, and what is between them, are one layer. Let the module run "
            "the same operations in both modes, or build a second module for "
            "evaluation and load full_state_dict() into it"
        )

    def _meet(
        self,
        purpose: str,
        graph: LayerGraph | None,
        plan: BurstPlan,
        trouble: StrettoError | None,
        *,
        more: str = "",
    ) -> None:
        """Require that all ranks pass the same model, plan and settings."""
        if self._ranks.size > 1:
            digest = "none" if graph is None else graph.digest
            operations = "none" if graph is None else graph.semantics
            trained = [p.requires_grad for p in self.module.parameters()]
            values = {
                "stretto": __version__,
                "torch": torch.__version__,
                "model": (
                    f"layers {digest}, operations {operations}, "
                    f"{trained.count(True)} trained parameters"
                ),
                "plan": _digest(plan),
                "settings": (
                    f"{self._settings}, timeout_s={self._ranks.timeout_s:g}{more}"
                ),
            }
            if trouble is not None:
                values["trouble"] = str(trouble)
            self._compare(purpose, values, trouble)
        if trouble is not None:
            raise trouble

    def _follow(self, graph: LayerGraph, widths: dict[str, Width]) -> None:
        """Run these layers on these ranks from now on."""
        _refuse_sparse(graph)
        self._partition.forget_schedules()
        for old in self._graphs:
            self._forward.forget(old)
        self._graphs, self._widths = [graph], widths
        self._widths_in = {graph: widths}
        self._structure = Structure(self.module)
        self._reached = Reached(self._structure.parameters)
        everywhere = (0, self._ranks.size)
        self._width_of, self._layer_of = {}, {}
        for node in graph.nodes:
            for parameter in node.module.parameters():
                self._width_of[id(parameter)] = widths[node.name]
                self._layer_of[id(parameter)] = node.name
        # Parameters that no layer uses may be used by the loss, on every rank.
        self._loose = tuple(
            p for _, p in self._structure.parameters if id(p) not in self._width_of
        )
        for parameter in self._loose:
            self._width_of[id(parameter)] = everywhere
            self._layer_of[id(parameter)] = _LOOSE
        self._rank_groups.open(
            [*widths.values(), *([everywhere] if self._loose else [])]
        )
        self._forward.prepare(graph, widths, self._batch_norm)
        self._replicas.watch(graph, widths)
        self._changes.reset(is_on=not self.is_whole())
        self._uses.reset(
            (p for _, p in self._structure.parameters), is_on=self._changes.is_on
        )
        mine = [node for node in graph.nodes if self._runs(node.name)]
        self._stale_guard.runs(
            [
                *(t for node in mine for t in params.trained_and_changed(node)),
                *self._loose,
            ],
            [
                (node.name, params.trained_and_changed(node))
                for node in graph.nodes
                if not self._runs(node.name)
            ],
        )
        self._patterns, self._trained = {}, None
        self._syncs.clear()
        self._shadows.clear()
        self._use_trained(self._structure.trained())

    def _use_trained(self, trained: tuple[bool, ...]) -> None:
        """Update which parameters need a gradient; local to this rank."""
        is_on = True
        if self._sync is not None:
            is_on = self._sync.is_on
            self._sync.require_nothing_kept("parameters were frozen or unfrozen")
        self._trained = trained
        graph = self._graphs[0]
        mine = [node for node in graph.nodes if self._runs(node.name)]
        for handle in self._direct_handles:
            handle.remove()
        self._direct_handles = []
        for _, parameter in self._structure.parameters:
            if parameter.requires_grad:
                hook = _DirectHook(self, parameter)
                self._direct_handles.append(parameter.register_hook(hook))
        self._use_shadows()
        if trained not in self._syncs:
            self._syncs[trained] = self._make_sync(mine)
            while len(self._syncs) > _MOST_SYNCS:
                self._syncs.popitem(last=False)
        self._syncs.move_to_end(trained)
        self._sync = self._forward.sync = self._syncs[trained]
        self._sync.is_on = is_on
        self._execution_plans = self._patterns.setdefault(
            trained, {graph: execution_plan_of(graph, self._widths)}
        )

    def _use_shadows(self) -> None:
        """Let every capture's layers compute with shadows of their parameters.

        Captures share the model's submodules, but each holds the parameters that its
        operations read directly.
        """
        self._shadows.use_for(
            (
                part
                for graph in self._graphs
                for node in graph.nodes
                if self._is_in(self._widths_in[graph][node.name])
                for part in node.module.modules()
            ),
            (p for p in self._loose if p.requires_grad),
        )

    def _make_sync(self, mine: list[LayerNode]) -> GradientSync:
        layers = [
            SyncedLayer(
                name=node.name,
                width=self._widths[node.name],
                parameters=tuple(
                    p for p in node.module.parameters() if p.requires_grad
                ),
            )
            for node in mine
        ]
        layers.append(
            SyncedLayer(
                name=_LOOSE,
                width=(0, self._ranks.size),
                parameters=tuple(p for p in self._loose if p.requires_grad),
            )
        )
        return GradientSync(
            self._rank_groups,
            self._clock,
            self._shadows,
            layers,
            bucket_bytes=self._bucket_bytes,
        )

    def _runs(self, layer: str) -> bool:
        return self._is_in(self._widths[layer])

    def _is_in(self, width: Width) -> bool:
        return width[0] <= self._ranks.rank < sum(width)

    def _execution_plan_now(self) -> ExecutionPlan:
        graph = self._graph_now()
        if graph not in self._execution_plans:
            widths = self._widths_in[graph]
            self._execution_plans[graph] = execution_plan_of(graph, widths)
        return self._execution_plans[graph]

    def _graph_now(self) -> LayerGraph:
        """Return the capture for the current modes; local to this rank."""
        ambient = Ambient.now(self._device_used)
        for graph in self._graphs:
            if graph.ambient == ambient and graph.outdated() is None:
                return graph
        graph = self._capture_as_is(ambient)
        self._forward.prepare(graph, self._widths_in[graph], self._batch_norm)
        self._graphs.append(graph)
        if len(self._graphs) > _MOST_GRAPHS:
            old = self._graphs.pop(1)
            del self._widths_in[old]
            self._forward.forget(old)
            self._partition.forget_schedules()
            for plans in self._patterns.values():
                plans.pop(old, None)
        self._use_shadows()
        return graph

    def _trouble(self) -> StrettoError | None:
        """Return the reason why the model can't run now."""
        changed = self._structure.changed()
        if changed is None:
            return None
        return StrettoError(
            f"{changed!r} was replaced or moved after the burst model was built, which "
            "still uses the old one: build BurstParallel again after changing the "
            "module"
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
        try:
            return self._forwarded(args, kwargs)
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
        self._refuse_callers(args, kwargs)
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
            watch = self._reached.watch(results)
            hook_of = watch if results.differs else None
        found = results.unpack(output, hook_of)
        return hooks.after(self.module, args, kwargs, found)

    def _ready_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ExecutionPlan, StrettoError | None]:
        """Return the execution of the next forward, and the reason if it can't run."""
        if not self._execution_plans:
            self._set_up(args, kwargs)
        trouble = self._trouble()
        if trouble is None and (trained := self._structure.trained()) != self._trained:
            self._use_trained(trained)
        if trouble is None:
            try:
                return self._execution_plan_now(), None
            except StrettoError as exc:
                trouble = exc
        return next(iter(self._execution_plans.values())), trouble

    def _through_layers(
        self, execution: ExecutionPlan, batch: Tensor, trouble: StrettoError | None
    ) -> Tensor:
        """Return the layers' output for this rank's packed rows, ready for backward."""
        self._cut_short()
        self._rank_groups.refusals.next_step()
        self._activations.settle()
        assert self._trained is not None  # noqa: S101
        with normal_tensors():
            layouts, input_needs = self._partition.exchange(
                execution.graph,
                batch,
                is_training=self.module.training,
                step=self._forward.draws.step,
                trained=number_of(self._trained),
                operations=int(execution.graph.semantics[-14:], 16),
                replicas=self._replicas,
                changes=self._changes,
                uses=self._uses,
                trouble=trouble,
            )
            # Buffers such as running statistics change without a backward.
            if self.module.training:
                self._stale_guard.changed()
            with self._inside(), self._stale_guard.opened():
                execution.graph.require_count(layouts.num_samples)
                schedule = self._partition.schedule(execution, layouts)
        grad = torch.is_grad_enabled()
        with (
            self._inside(),
            self._stale_guard.opened(),
            self._shadows.in_place(),
            marked(self.module, batch.grad_fn) as has_hooks,
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
        if grad and output.requires_grad:
            self._share = layouts.shares[self._ranks.rank] / layouts.num_samples
            output = mark_output(
                output,
                self._share,
                partial(self._output_backward, execution.graph.results),
                [p for p in self._own_parameters() if p.requires_grad],
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

    def _refuse_callers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reject wrappers and transforms around the model.

        Raises:
            StrettoError: naming the wrapper or transform.
        """
        outer = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if outer is not None and any(part is self for part in outer.modules()):
            raise StrettoError(
                "a BurstParallel inside DistributedDataParallel would have its "
                "gradients averaged twice: call the burst model itself"
            )
        in_forward_mode = torch.autograd.forward_ad._current_level >= 0  # noqa: SLF001
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (
                in_forward_mode or _is_transformed(value)
            ):
                raise StrettoError(
                    "torch.func transforms (grad, vmap, jacrev, jvp) and forward-mode "
                    "differentiation can't pass through a burst model, whose layers "
                    "run on several ranks: call it with ordinary tensors and "
                    "backward(), or transform a model that is not burst parallel"
                )

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self._structure.parameters:
            if self._runs_parameter(parameter):
                yield parameter

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Inform the other ranks if this rank can't finish the step."""
        try:
            yield
        except Exception as exc:
            if self._rank_groups.failures.error is None:
                self._rank_groups.refusals.tell(exc, inside=True)
            raise

    def _output_backward(self, results: Results, grad: Tensor) -> None:
        """Record that backward comes from the model's output, with its gradient."""
        with self._inside():
            require_values(grad)
        if not results.differs:  # else the outputs' own hooks record them
            self._reached.arrived_at_all(results)
        self._begin_backward()

    def _begin_backward(self) -> None:
        if not self._queued:
            self._queued = True
            assert self._sync is not None  # noqa: S101
            if any(self._trained or ()):
                self._stale_guard.backward_begins()
            with self._inside():
                self._require_none_left_over()
                self._uses.backward_begins(self._changes.backward_begins())
                self._sync.begin()
            _queue_callback(self._backward_ended)

    def _require_none_left_over(self) -> None:
        """Reject gradients from before the model was set up, except zeros.

        Raises:
            StrettoError: the backward would add to one.
        """
        for name, parameter, grad in self._left_over:
            if parameter.grad is not grad:
                continue
            if bool(grad.count_nonzero()):
                raise StrettoError(
                    f"parameter {name!r} still has a gradient from before the burst "
                    "model was built, which no other rank has: call "
                    "optimizer.zero_grad() or model.zero_grad() before backward()"
                )
            if not self._runs_parameter(parameter):
                parameter.grad = None  # an optimizer would take a step with zeros
        self._left_over = []

    def _runs_parameter(self, parameter: nn.Parameter) -> bool:
        first, width = self._width_of[id(parameter)]
        return first <= self._ranks.rank < first + width

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        assert self._sync is not None  # noqa: S101
        with self._inside():
            self._sync.arrived(parameter)

    def _direct_gradient(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Store the gradient of the loss's own use of a parameter.

        Raises:
            StrettoError: not every rank runs the parameter's layer.
        """
        with self._inside():
            return self._taken(parameter, grad)

    def _taken(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        if self._width_of[id(parameter)] != (0, self._ranks.size):
            raise StrettoError(
                f"the loss uses a parameter of layer {self._layer_of[id(parameter)]!r} "
                "directly, but not every rank runs this layer: use the optimizer's "
                "weight_decay, or after backward() add the penalty's gradient to "
                ".grad where that is not None, or give the layer all ranks"
            )
        self._begin_backward()
        self._reached.arrived_at(parameter)
        assert self._sync is not None  # noqa: S101
        self._sync.add_direct(parameter, grad * self._share)
        return torch.zeros_like(grad)

    @without_dynamo
    def _backward_ended(self) -> None:
        if self._timings.is_on:
            self._clock.other()
        self._queued = False
        assert self._sync is not None  # noqa: S101
        with self._inside():
            # See Note [Outputs that no loss uses] in `stretto.burst.reach`.
            with self._rank_groups.guard("joining the outputs that losses use"):
                self._reached.join(self._rank_groups.reduce_number, self._device_used)
            self._sync.finish(self._reached.unreached())
            self._activations.settle()
        if self._sync.is_on:
            self._reached.reset()
        torch_calls.backward_ended(self)
        if self._sync.is_on:
            self._changes.backward_ended(self._own_parameters())
        self._timings.step_ended()

    def _cut_short(self) -> None:
        """Clear the state of a backward that an exception ended."""
        if self._queued and self._sync is not None:
            self._queued = False
            error = StrettoError("its backward was ended by an exception")
            self._rank_groups.refusals.tell(error, inside=True)
            self._sync.reset()
            self._reached.reset()
            self._changes.reset()
            self._uses.cut_short()
            self._activations.drop()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the next backward outside sends them.

        Samples still move between layers.
        """
        if self._sync is None:
            raise StrettoError("no_sync needs example_inputs, or a first forward")
        self._sync.is_on = False
        try:
            yield
        finally:
            self._sync.is_on = True

    # Parameters.

    def refresh(self, *optimizers: Optimizer) -> None:
        """Give this rank the parameters and buffers of layers that it does not run.

        Every rank must call it, after the optimizer's step. If optimizers are passed,
        their states are sent too, so that ``optimizer.state_dict()`` is complete.
        """
        if not self._execution_plans:
            return
        self._meet_to_refresh(optimizers)
        self._require_equal_copies()
        if optimizers:
            self._require_nothing_else(optimizers)
        roots = {name: first for name, (first, _) in self._widths.items()}
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
            self._compare(purpose, {"the optimizers' parameters": counts}, None)
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
        graph = self._graphs[0]
        with self._stale_guard.opened():
            params.bring(self._rank_groups, graph, roots, place)
            params.bring_states(
                self._rank_groups, graph, roots, optimizers, self._device_used
            )

    def _bring_gradients(self, roots: dict[str, int]) -> None:
        with self._stale_guard.opened():
            params.bring_gradients(self._rank_groups, self._graphs[0], roots)

    def _require_equal_copies(self) -> None:
        """Compare a sample of every parameter that several ranks hold. Collective.

        Also compare the factors of gradients since the last forward.
        """
        values = self._replicas.all_values()
        if values or self._changes.is_on:
            factors, options = self._changes.next_values(), self._uses.next_values()
            with self._rank_groups.guard("comparing the ranks' copies"):
                rows = self._rank_groups.exchange([*factors, *options, *values])
            first, second = len(factors), len(factors) + len(options)
            self._uses.require_alike([row[first:second] for row in rows])
            self._replicas.require_all_equal([row[second:] for row in rows])
            self._changes.require_alike([row[:first] for row in rows])

    def _options_of_all(self, mine: str) -> list[str]:
        """Return every rank's text on its optimizers' options. Collective."""
        with self._rank_groups.refusals.waiting("comparing optimizers' options"):
            return self._agreement.gather("compare optimizers' options", mine)

    def _require_nothing_else(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Require that optimizers differ by rank only in their ``state``. Collective.

        Raises:
            StrettoError: on all ranks, naming what differs.
        """
        if self._ranks.size == 1:
            return
        with self._stale_guard.opened():
            mine = json.dumps(kept_outside(optimizers))
        with self._rank_groups.refusals.waiting("comparing what optimizers keep"):
            texts = self._agreement.gather("compare what optimizers keep", mine)
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
        plan = self._together(purpose, lambda: _loaded(given))
        if not self._execution_plans:
            self.plan = plan
            return
        known = [o for o in self._stale_guard.optimizers() if o not in optimizers]
        every = (*optimizers, *known)
        trouble: StrettoError | None = None
        before, old = self.plan, self._widths
        graph, widths = self._graphs[0], old
        self.plan = plan
        try:
            assert self._sync is not None  # noqa: S101
            self._sync.require_nothing_kept("apply_plan was called")
            graph = self._capture()
            widths = widths_of(plan, graph, self._ranks.size)
        except StrettoError as exc:
            trouble = exc
        try:
            more = f", {len(every)} optimizers"
            self._meet("apply a burst plan", graph, plan, trouble, more=more)
            if every:
                self._require_nothing_else(every)
        except StrettoError:
            self.plan = before
            raise
        names = self._graphs[0]
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
            if not self._runs(node.name):
                for parameter in node.module.parameters():
                    parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm together is at most ``max_norm``.

        The same as `torch.nn.utils.clip_grad_norm_` on ``parameters()``. Every rank
        must call it. Returns the norm before scaling.
        """
        if not self._execution_plans:
            raise StrettoError("there are no gradients before the first forward")
        held = list(self.module.parameters())
        self._changes.look_at_gradients()
        total = torch_calls.joint_norm(held, [self], float(norm_type))
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        params.scale_gradients(held, factor)
        self._changes.gradients_were_scaled()
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
        if not self._execution_plans:
            raise StrettoError("there are no gradients before the first forward")
        held = list(self.module.parameters())
        return torch_calls.joint_norm(held, [self], float(norm_type))

    # The interface for PyTorch's functions, see `torch_calls`.

    @property
    def order(self) -> int:
        """A number by which every rank sorts its models in the same order."""
        return self._agreement.serial

    def owns(self, parameter: Tensor) -> bool:
        """Return whether a parameter is the model's, and ranks hold different ones."""
        return self._ranks.size > 1 and id(parameter) in self._width_of

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this rank is the first that holds the parameter's gradient."""
        width = self._width_of.get(id(parameter))
        return width is not None and width[0] == self._ranks.rank

    def is_whole(self) -> bool:
        """Return whether every rank runs every layer."""
        return all(width == (0, self._ranks.size) for width in self._widths.values())

    def reduce_number(self, value: Tensor, operation: Any, place: str) -> None:
        """All-reduce a number over the model's ranks in place."""
        with self._rank_groups.guard(place):
            self._rank_groups.reduce_number(value, operation)

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record that an optimizer of the model's parameters takes a step.

        Raises:
            StrettoError: it reads all gradients together, and each rank holds only
            some.
        """
        self._is_preparing = False
        if not self.is_whole():
            if self._stale_guard.is_preparing(optimizer):
                self._is_preparing = True
                return
            with self._stale_guard.opened():
                found = why_together(optimizer, args, kwargs)
            if found is not None:
                error = StrettoError(
                    f"{found}, and this plan does not run every layer on every rank: "
                    "use an optimizer that treats each parameter by itself, or a plan "
                    "with all ranks for every layer"
                )
                self._rank_groups.refusals.tell(error)
                raise error
        self._stale_guard.before_step(optimizer)

    def before_use(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's step uses the gradients as they are now."""
        if not self._is_preparing:
            used = self._changes.before_step(
                p for group in optimizer.param_groups for p in group["params"]
            )
            self._uses.before_step(optimizer, used.values())

    def after_step(self) -> None:
        """Record that an optimizer of the model's parameters has taken a step."""
        self._changes.after_step()

    def before_backward(self, losses: Iterable[Tensor]) -> None:
        """Check the tensors from which a backward starts.

        Raises:
            StrettoError: one depends on an activation that a forward hook kept.
        """
        name = kept_behind(losses)
        if name is not None:
            with self._inside():
                raise StrettoError(
                    f"the loss uses an activation that a forward hook of {name!r} has "
                    "kept, so its gradient would not enter the model by an output: "
                    "return the tensor as an output of the model, or detach() it in "
                    "the hook"
                )

    def look_at_gradients(self) -> None:
        """Record what the program has done to gradients so far."""
        self._changes.look_at_gradients()

    def gradients_were_scaled(self) -> None:
        """Record that gradients have just been scaled equally on all ranks."""
        self._changes.gradients_were_scaled()

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
    def widths(self) -> dict[str, Width]:
        """Ranks of each layer: first and number. Empty before the first forward."""
        return dict(self._widths)


_Made = TypeVar("_Made")


def _loaded(plan: BurstPlan | str | Path) -> BurstPlan:
    if isinstance(plan, BurstPlan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise SpecError(
            "the plan must be a BurstPlan, from stretto.plan_layers, or the path of "
            f"its file, got {'None' if plan is None else type(plan).__name__}"
        )
    return BurstPlan.load(plan)


def _checked(
    module: nn.Module,
    plan: BurstPlan | str | Path,
    examples: tuple[Any, Any],
    batch_norm: str,
    bucket_bytes: int,
    lanes: int,
) -> BurstPlan:
    """Return the plan, if the arguments are valid."""
    require_module(module, *examples)
    if batch_norm not in KINDS:
        raise SpecError(
            f"batch_norm must be one of {', '.join(KINDS)}, got {batch_norm!r}"
        )
    for name, value in (("bucket_bytes", bucket_bytes), ("lanes", lanes)):
        if value < 1:
            raise SpecError(f"{name} must be >= 1, got {value}")
    _refuse_nested(module)
    _refuse_overlaps(module)
    return _loaded(plan)


def _is_ended(rank_groups: weakref.ref[RankGroups]) -> bool:
    found = rank_groups()
    return found is not None and found.failures.error is not None


@final
class _DirectHook:
    """Receives gradients that reach a parameter directly, not through a layer."""

    is_stretto = True

    def __init__(self, model: BurstParallel, parameter: nn.Parameter) -> None:
        # See Note [Hooks hold nothing] in `stretto.burst.shadows`.
        self._model = weakref.ref(model)
        self._parameter = weakref.ref(parameter)

    @without_dynamo
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient that autograd must add to ``.grad``."""
        model, parameter = self._model(), self._parameter()
        if grad is None:
            return None
        if model is None or parameter is None:
            raise StrettoError(MODEL_GONE)
        return model._direct_gradient(parameter, grad)  # noqa: SLF001


def _refuse_nested(module: nn.Module) -> None:
    for name, part in module.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if "OptimizedModule" in kinds:
            where = f"its submodule {name!r}" if name else "the module"
            raise SpecError(
                f"{where} was compiled by torch.compile(...), whose operations can't "
                "be seen: pass the module as it was before"
            )
        if found := sorted(kinds & _PARALLEL):
            where = f"its submodule {name!r}" if name else "the module"
            raise SpecError(
                f"{where} is a {found[0]}, which moves gradients between ranks itself: "
                "pass the plain module to BurstParallel"
            )


def _refuse_overlaps(module: nn.Module) -> None:
    """Reject parameters that share memory: each would be updated by its own ranks."""
    rows = sorted(
        (p.device.type, p.untyped_storage().data_ptr(), *_extent(p), name)
        for name, p in module.named_parameters()
        if p.numel() and p.layout == torch.strided and not p.is_meta
    )
    for one, two in itertools.pairwise(rows):
        if one[:2] == two[:2] and two[2] < one[3]:
            raise SpecError(
                f"parameters {one[4]!r} and {two[4]!r} share memory, which ranks that "
                "run one of them can't keep the same: use one nn.Parameter in both "
                "places, or compute the one from the other in forward"
            )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    first = int(tensor.storage_offset())
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((int(side) - 1) * int(stride) for side, stride in sides)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _is_transformed(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # noqa: SLF001


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


def _refuse_sparse(graph: LayerGraph) -> None:
    for node in graph.nodes:
        for part in node.module.modules():
            if getattr(part, "sparse", False) is True:
                raise SpecError(
                    f"layer {node.name!r} has sparse gradients, which can't be added "
                    f"over ranks: pass sparse=False to {type(part).__name__}"
                )


def _digest(plan: BurstPlan) -> str:
    text = repr((plan.profile_digest, plan.gpus, plan.layers))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
