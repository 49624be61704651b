"""Follow a plan: the captures, ranks and senders by which a burst model runs."""

from __future__ import annotations

import gc
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, final

from stretto.burst import parameters as params
from stretto.burst import torch_calls
from stretto.burst.checks.guarded_tensors import require_current
from stretto.burst.checks.structure import Structure, described_tensors
from stretto.burst.checks.verify_first_step import require_comparable
from stretto.burst.gradient_sync import GradientSync, SyncedLayer
from stretto.burst.hooks import has_of_all
from stretto.burst.ownership import LOOSE
from stretto.burst.requirements import refuse_sparse
from stretto.burst.schedule import rank_ranges_of
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from stretto.burst.captures import Trained
    from stretto.burst.parts import Parts
    from stretto.burst.rank_groups import RankRange
    from stretto.burst.schedule import ExecutionPlan
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.schema.burst import BurstPlan

_MAX_SYNCS = 4
"""Number of sets of trained parameters whose buffers are kept: a GAN freezes and
unfreezes one model in every step."""


@final
class PlanFollower:
    """Keeps a model's parts on its plan, its modes and the parameters that it trains.

    Args:
        plan: the first one.
        parts: of the model.
    """

    def __init__(self, plan: BurstPlan, parts: Parts) -> None:
        self.plan = plan
        self.trained: Trained = ()
        """Which parameters need a gradient."""
        self._parts = parts
        self._structure = Structure(parts.module)
        self._syncs: OrderedDict[Trained, GradientSync] = OrderedDict()

    # Setup.

    def set_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Capture the module with an example, and follow the first plan. Collective.

        Raises:
            StrettoError: the module can't be captured, or the plan is for another.
            RankDisagreement: ranks passed different models, plans or settings.
        """
        parts = self._parts
        parts.captures.use_example(args, kwargs)
        widths: dict[str, RankRange] = {}
        trouble: StrettoError | None = None
        graph = None
        try:
            self._require_own_parameters()
            graph = parts.captures.capture_for(self.plan)
            parts.hooks.note_checked(parts.module, graph.proven)
            widths = rank_ranges_of(self.plan, graph, parts.ranks.size)
            if parts.settings.verify:
                require_comparable(parts.module, graph, parts.settings.batch_norm)
        except StrettoError as exc:
            trouble = exc
        self.meet("build a burst-parallel model", graph, trouble)
        assert graph is not None  # noqa: S101
        self._replace_others()
        self.follow(graph, widths)
        roots = dict.fromkeys(widths, 0)
        with parts.stale_guard.opened():
            place = "sending the first rank's state"
            params.bring(parts.rank_groups, graph, roots, place)
            params.bring_tensors(parts.rank_groups, parts.ownership.loose, 0, place)
        parts.backward.note_left_over(self._structure.parameters)

    def _replace_others(self) -> None:
        """End the use of burst models over the same module."""
        if self._is_whole:
            return
        for other in torch_calls.models():
            if other.module is self._parts.module and other is not self._parts.seam:
                other.replace()
                torch_calls.remove(other)

    @property
    def _is_whole(self) -> bool:
        """Whether the plan runs every layer on every rank."""
        return all(e.gpus == self._parts.ranks.size for e in self.plan.layers)

    def _require_own_parameters(self) -> None:
        """Refuse parameters that another burst model keeps on some ranks only.

        A model over the same module is one that this one replaces, if this rank has
        the current values.
        """
        module = self._parts.module
        require_current((*module.parameters(), *module.buffers()))
        is_whole = self._is_whole
        names = {id(p): name for name, p in module.named_parameters()}

        def shared() -> str | None:
            for other in torch_calls.models():
                if other.module is not module and not (
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

    def meet(
        self,
        purpose: str,
        graph: LayerGraph | None,
        trouble: StrettoError | None,
        *,
        more: str = "",
    ) -> None:
        """Require that all ranks pass the same model, plan and settings. Collective.

        Args:
            purpose: what the ranks are about to do.
            graph: the plan's layers; None if this rank could not capture them.
            trouble: why this rank can't take part.
            more: what else must be equal.

        Raises:
            StrettoError: ``trouble``, if there is any.
            RankDisagreement: ranks differ, or another rank has trouble.
        """
        parts = self._parts
        parts.meeting.require_same_model(
            purpose,
            graph=graph,
            example=parts.captures.described_example(),
            trained=sum(p.requires_grad for p in parts.module.parameters()),
            held=described_tensors(parts.module),
            plan=_digest(self.plan),
            settings=f"{parts.settings}, timeout_s={parts.ranks.timeout_s:g}{more}",
            trouble=trouble,
        )

    def follow(self, graph: LayerGraph, widths: dict[str, RankRange]) -> None:
        """Run these layers on these ranks from now on."""
        refuse_sparse(graph)
        parts = self._parts
        parts.exchange.forget_schedules()
        for old in parts.captures:
            parts.forward.forget(old)
        parts.captures.follow(graph, widths)
        self._structure = Structure(parts.module)
        parameters = self._structure.parameters
        parts.ownership.assign(graph, widths, (p for _, p in parameters))
        parts.backward.follow(parameters)
        everywhere = [parts.ownership.everywhere] if parts.ownership.loose else []
        parts.rank_groups.open([*widths.values(), *everywhere])
        parts.forward.prepare(graph, widths, parts.settings.batch_norm)
        self._watch(graph, widths)
        self._syncs.clear()
        parts.shadows.forget()
        self._use_trained(self._structure.trained())

    def _watch(self, graph: LayerGraph, widths: Mapping[str, RankRange]) -> None:
        """Let the checks compare the ranks of these layers."""
        parts, parameters = self._parts, self._structure.parameters
        ownership, runs = parts.ownership, parts.ownership.runs
        parts.replicas.watch(graph, widths)
        parts.constants.watch(graph)
        is_on = not ownership.is_whole()
        parts.changes.reset(is_on=is_on)
        parts.uses.reset(parameters, ownership.runs_parameter, is_on=is_on)
        layers = [(node.module, runs(node.name)) for node in graph.nodes]
        parts.hooks.watch(parts.module, parameters, layers)
        tensors = {node.name: node.trained_and_changed() for node in graph.nodes}
        own = [t for name, each in tensors.items() if runs(name) for t in each]
        parts.stale_guard.runs(
            [*own, *ownership.loose],
            [(name, each) for name, each in tensors.items() if not runs(name)],
        )

    # Each forward.

    def execution_now(self) -> tuple[ExecutionPlan, StrettoError | None]:
        """Return the execution of the next forward, and the reason if it can't run."""
        captures = self._parts.captures
        of_all = has_of_all()
        trouble = self._replaced() or self._parts.hooks.refused()
        if trouble is None and of_all:
            examples = captures.example_tensors()
            trouble = self._parts.later_of_all(captures.planned, examples)
        if trouble is None and (trained := self._structure.trained()) != self.trained:
            self._use_trained(trained)
        if trouble is None:
            try:
                if of_all:
                    with self._parts.hooks.set_aside():
                        graph = self.graph_now()
                        self._recheck(graph)
                else:
                    graph = self.graph_now()
                    self._recheck(graph)
                return captures.execution_plan(graph, self.trained), None
            except StrettoError as exc:
                trouble = exc
        return self.planned_execution(), trouble

    def _recheck(self, graph: LayerGraph) -> None:
        """Compare a capture with what forward does now, if it is due."""
        parts = self._parts
        if not (parts.timings.is_on or parts.captures.reruns(graph)):
            with parts.stale_guard.opened():
                parts.recheck(graph, parts.forward.draws.step)

    def planned_execution(self) -> ExecutionPlan:
        """Return the execution of the layers for which the plan was made."""
        captures = self._parts.captures
        return captures.execution_plan(captures.planned, self.trained)

    def _replaced(self) -> StrettoError | None:
        """Return the error of a module or parameter that is not the original one."""
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

    def graph_now(self) -> LayerGraph:
        """Return the capture for the current modes; local to this rank."""
        parts = self._parts
        graph = parts.captures.current()
        if graph is None:
            graph = parts.captures.add(self._forget)
            if graph.ambient.grad and not graph.ambient.autocast:
                parts.hooks.note_checked(parts.module, graph.proven)
            widths = parts.captures.widths_in(graph)
            parts.forward.prepare(graph, widths, parts.settings.batch_norm)
            self._use_shadows()
        elif graph.ambient.grad and graph.proven is not parts.hooks.proven:
            parts.hooks.follow(graph.proven)
        return graph

    def _forget(self, graph: LayerGraph) -> None:
        self._parts.forward.forget(graph)
        self._parts.exchange.forget_schedules()

    def _use_trained(self, trained: Trained) -> None:
        """Update which parameters need a gradient; local to this rank."""
        backward = self._parts.backward
        if backward.sync is not None:
            changed = "parameters were frozen or unfrozen"
            backward.sync.require_nothing_kept(changed)
        self.trained = trained
        self._use_shadows()
        if trained not in self._syncs:
            self._syncs[trained] = self._make_sync(self._parts.captures.planned)
            while len(self._syncs) > _MAX_SYNCS:
                self._syncs.popitem(last=False)
        self._syncs.move_to_end(trained)
        backward.use(self._syncs[trained], trained)

    def _use_shadows(self) -> None:
        """Let every capture's layers compute with shadows of their parameters.

        Captures share the model's submodules, but each holds the parameters that its
        operations read directly.
        """
        captures, ownership = self._parts.captures, self._parts.ownership
        self._parts.shadows.use_for(
            part
            for graph in captures
            for node in graph.nodes
            if ownership.includes(captures.widths_in(graph)[node.name])
            for part in node.module.modules()
        )

    def _make_sync(self, graph: LayerGraph) -> GradientSync:
        parts, ownership = self._parts, self._parts.ownership
        layers = [
            _synced(node.name, ownership.widths[node.name], node.module.parameters())
            for node in graph.nodes
            if ownership.runs(node.name)
        ]
        layers.append(_synced(LOOSE, ownership.everywhere, ownership.loose))
        return GradientSync(
            parts.rank_groups,
            parts.clock,
            parts.shadows,
            layers,
            parts.hooks,
            bucket_bytes=parts.settings.bucket_bytes,
        )


def _synced(
    layer: str, width: RankRange, parameters: Iterable[nn.Parameter]
) -> SyncedLayer:
    trained = tuple(p for p in parameters if p.requires_grad)
    return SyncedLayer(name=layer, width=width, parameters=trained)


def _digest(plan: BurstPlan) -> str:
    text = repr((plan.profile_digest, plan.gpus, plan.layers))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
