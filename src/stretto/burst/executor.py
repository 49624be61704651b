"""`BurstParallel`: trains a module with each layer on as many ranks as its plan says.

# Note [How a rank's loss counts]
Each rank calls the model with its share of the global batch and computes the mean loss
over that share, as with DDP. Where rank r has n_r of N samples, the gradient of its
output is multiplied by n_r / N, and each layer's gradients are added over its ranks:
that is the gradient of the mean loss over all N samples, whatever the shares.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto._version import __version__
from stretto.burst import parameters as params
from stretto.burst.clock import StepClock
from stretto.burst.forward import Forward
from stretto.burst.freshness import Freshness
from stretto.burst.graph import LayerGraph, capture
from stretto.burst.links import Links, Width
from stretto.burst.norm import KINDS
from stretto.burst.redistribute import Mover
from stretto.burst.shares import Shares
from stretto.burst.steps import Steps, steps_of, widths_of
from stretto.burst.sync import GradientSync, SyncedLayer
from stretto.burst.timings import Timings
from stretto.errors import PlanMismatch, RankDisagreement, SpecError, StrettoError
from stretto.runtime.agreement import Agreement, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from stretto.schema.burst import BurstPlan, LayerTiming

_log = logging.getLogger(__name__)

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001

BUCKET_BYTES = 4 * 2**20


@final
class BurstParallel(nn.Module):
    """A module whose layers run on the ranks that a `BurstPlan` gives them.

    Used as DDP is: each rank passes its share of the global batch, gets the outputs of
    these samples and computes the mean loss over them; shares may differ and may be
    empty. After ``backward()`` a rank has gradients of the layers that it runs, those
    of the mean loss over the global batch; others' are ``None``, and optimizers pass
    them over. Every rank must call forward and backward equally often.

    Args:
        module: reads one tensor and gives one, both with a row for each sample.
        plan: made for this module's layers, see `stretto.burst.graph.capture`.
        example_inputs: ``forward``'s arguments, of which only shapes and types count;
            ``None``: those of the first forward.
        process_group: the ranks; ``None``: all of the job.
        batch_norm: ``"sync"``: statistics of all samples, as one process computes
            them. ``"local"``: of each rank's samples alone, which is another
            computation for every plan; of the running ones those of a layer's first
            rank are kept.
        seed: dropout masks follow from it, the step, and a sample's number in the
            global batch, whatever the plan.
        timeout_s: how long to wait for another rank; ``None``: as the process group.
        bucket_bytes: gradients sent together.
        lanes: connections for gradients at the same time.

    Raises:
        PlanMismatch: the plan is for another model or for more ranks.
        RankDisagreement: ranks came with different models, plans or settings.
        SpecError: the module can't be split into layers, or an argument is wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: BurstPlan,
        *,
        example_inputs: tuple[Any, ...] | None = None,
        process_group: dist.ProcessGroup | None = None,
        batch_norm: str = "sync",
        seed: int = 0,
        timeout_s: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        lanes: int = 1,
    ) -> None:
        super().__init__()
        if batch_norm not in KINDS:
            raise SpecError(
                f"batch_norm must be one of {', '.join(KINDS)}, got {batch_norm!r}"
            )
        for name, value in (("bucket_bytes", bucket_bytes), ("lanes", lanes)):
            if value < 1:
                raise SpecError(f"{name} must be >= 1, got {value}")
        self.module = module
        self.plan = plan
        self._settings = (
            f"batch_norm={batch_norm}, seed={seed}, bucket_bytes={bucket_bytes}, "
            f"lanes={lanes}"
        )
        self._batch_norm = batch_norm
        self._bucket_bytes = bucket_bytes
        group = process_group or dist.distributed_c10d._get_default_group()  # noqa: SLF001
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._device_used = device
        self._ranks = ranks_of(group, timeout_s=timeout_s)
        self._agreement = Agreement(self._ranks)
        self._links = Links(
            self._ranks,
            serial=self._agreement.serial,
            backend=group._get_backend(device).name(),  # noqa: SLF001
            device=device,
            lanes=lanes,
        )
        self._clock = StepClock()
        self._mover = Mover(self._links, self._clock)
        self._timings = Timings(self._clock)
        self._forward = Forward(
            module, self._links, self._mover, self._clock, device=device, seed=seed
        )
        self._shares = Shares(self._links, self._clock)
        self._example = example_inputs
        self._steps: dict[bool, Steps] = {}
        self._widths: dict[str, Width] = {}
        self._sync: GradientSync | None = None
        self._queued = False
        self._freshness = Freshness(module, self._ranks)
        if example_inputs is not None:
            self._set_up(example_inputs)

    # Setting up.

    def _set_up(self, example_inputs: tuple[Any, ...]) -> None:
        self._example = example_inputs
        widths: dict[str, Width] = {}
        trouble: StrettoError | None = None
        graph = None
        try:
            graph = self._capture(training=True)
            widths = widths_of(self.plan, graph, self._ranks.size)
        except StrettoError as exc:
            trouble = exc
        self._meet("build a burst-parallel model", graph, self.plan, trouble)
        assert graph is not None  # noqa: S101
        self._carry_out(graph, widths)
        roots = dict.fromkeys(widths, 0)
        params.bring(self._links, graph, roots, "sending the first rank's state")

    def _capture(self, *, training: bool) -> LayerGraph:
        assert self._example is not None  # noqa: S101
        was = [(part, part.training) for part in self.module.modules()]
        try:
            for part, _ in was:
                part.training = training
            graph = capture(self.module, self._example)
            names = [entry.layer for entry in self.plan.layers]
            # The layers of an evaluation may be fewer: those that only training reads.
            whole = training or set(names) == {node.name for node in graph.nodes}
            return graph.joined(names) if whole else graph
        finally:
            for part, flag in was:
                part.training = flag

    def _meet(
        self,
        purpose: str,
        graph: LayerGraph | None,
        plan: BurstPlan,
        trouble: StrettoError | None,
    ) -> None:
        """Requires that all ranks have come with the same model, plan and settings."""
        if self._ranks.size > 1:
            digest = "none" if graph is None else graph.digest
            trained = [p.requires_grad for p in self.module.parameters()]
            values = {
                "stretto": __version__,
                "torch": torch.__version__,
                "model": f"layers {digest}, {trained.count(True)} trained parameters",
                "plan": _digest(plan),
                "settings": f"{self._settings}, timeout_s={self._ranks.timeout_s:g}",
            }
            if trouble is not None:
                values["trouble"] = str(trouble)
            try:
                self._agreement.require_same(purpose, values)
            except RankDisagreement:
                if trouble is None:
                    raise
        if trouble is not None:
            raise trouble

    def _carry_out(self, graph: LayerGraph, widths: dict[str, Width]) -> None:
        steps = steps_of(graph, widths)
        self._shares.forget_courses()
        self._links.open(widths.values())
        if self._sync is not None:
            self._sync.close()
        self._steps, self._widths = {True: steps}, widths
        self._forward.prepare(graph, widths, self._batch_norm)
        mine = [node for node in graph.nodes if self._runs(node.name)]
        self._freshness.runs(
            [p for node in mine for p in node.module.parameters()],
            [node.name for node in graph.nodes if not self._runs(node.name)],
        )
        self._sync = GradientSync(
            self._links,
            self._clock,
            [
                SyncedLayer(
                    name=node.name,
                    width=widths[node.name],
                    parameters=tuple(
                        p for p in node.module.parameters() if p.requires_grad
                    ),
                )
                for node in mine
            ],
            bucket_bytes=self._bucket_bytes,
        )
        self._forward.sync = self._sync

    def _runs(self, layer: str) -> bool:
        first, width = self._widths[layer]
        return first <= self._ranks.rank < first + width

    def _steps_now(self) -> Steps:
        training = self.module.training
        if training not in self._steps:
            graph = self._capture(training=training)
            unknown = [n.name for n in graph.nodes if n.name not in self._widths]
            if unknown:
                raise PlanMismatch(
                    f"layer {unknown[0]!r} runs in evaluation alone, so the plan does "
                    "not place it: let the module run the same layers in both modes"
                )
            self._forward.prepare(graph, self._widths, self._batch_norm)
            self._steps[training] = steps_of(graph, self._widths)
        return self._steps[training]

    # Running.

    def forward(self, batch: Tensor) -> Tensor:
        """The module's output for this rank's share of the global batch.

        Raises:
            SpecError: a sample has another shape or type than the example's.
            RankDisagreement: ranks came in different modes, or one with bad input.
            CommTimeout: a rank was lost.
        """
        if self._links.desk.error is not None:
            raise self._links.desk.error
        if not self._steps:
            self._set_up((batch,))
        steps = self._steps_now()
        if self._timings.is_on:
            self._clock.other()
        self._cut_short()
        self._mover.settle()
        layouts, input_needs = self._shares.exchange(
            steps.graph,
            batch,
            is_training=self.module.training,
            step=self._forward.draws.step,
        )
        train = torch.is_grad_enabled()
        self._freshness.is_stale |= self.module.training and self._ranks.size > 1
        output = self._forward(
            steps,
            self._shares.course(steps, layouts),
            batch,
            input_needs=input_needs,
            stamp=self._timings.is_on,
        )
        if train and output.requires_grad:
            share = layouts.shares[self._ranks.rank] / layouts.num_samples
            output.register_hook(lambda grad: self._output_grad(grad, share))
        if self._timings.is_on:
            self._clock.other()
            self._timings.forward_ended(
                {
                    step.node.name: len(layouts.samples(step.width)[self._ranks.rank])
                    for step in steps.layers
                }
            )
        return output

    def _output_grad(self, grad: Tensor, share: float) -> Tensor:
        if not self._queued:
            self._queued = True
            _queue_callback(self._backward_ended)
        return grad * share

    def _backward_ended(self) -> None:
        if self._timings.is_on:
            self._clock.other()
        self._queued = False
        assert self._sync is not None  # noqa: S101
        self._sync.finish()
        self._mover.settle()
        self._timings.step_ended()

    def _cut_short(self) -> None:
        """Clears what a backward left that an exception ended."""
        if self._queued and self._sync is not None:
            self._queued = False
            self._sync.reset()
            self._mover.drop()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients add up on each rank; the next backward sends them.

        Samples move between layers all the same.
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
        """Gives this rank the parameters and buffers of layers that it does not run.

        Every rank must call it, after the optimizer's step. With optimizers their
        states come too, so that ``optimizer.state_dict()`` is whole.
        """
        roots = {name: first for name, (first, _) in self._widths.items()}
        if not self._steps:
            return
        self._bring(roots, optimizers, "bringing parameters")
        self._freshness.refreshed()

    def _bring(
        self, roots: dict[str, int], optimizers: tuple[Optimizer, ...], place: str
    ) -> None:
        graph = self._steps[True].graph
        params.bring(self._links, graph, roots, place)
        params.bring_states(self._links, graph, roots, optimizers, self._device_used)

    def full_state_dict(self) -> dict[str, Any]:
        """The module's whole state; every rank must call it."""
        self.refresh()
        return self.module.state_dict()

    def apply_plan(self, plan: BurstPlan, *optimizers: Optimizer) -> None:
        """Follows another plan from the next forward on; every rank must call it.

        Layers that a rank runs from now on come to it with their parameters, buffers
        and the optimizers' states. Call it between ``optimizer.step()`` and the next
        forward: gradients of layers that a rank does not run any more are dropped.

        Raises:
            PlanMismatch: it is for another model or more ranks; the old one stays.
            RankDisagreement: ranks came with different plans.
        """
        if not self._steps:
            self.plan = plan
            return
        trouble: StrettoError | None = None
        before, old = self.plan, self._widths
        graph, widths = self._steps[True].graph, old
        self.plan = plan
        try:
            graph = self._capture(training=True)
            widths = widths_of(plan, graph, self._ranks.size)
        except StrettoError as exc:
            trouble = exc
        try:
            self._meet("apply a burst plan", graph, plan, trouble)
        except StrettoError:
            self.plan = before
            raise
        names = self._steps[True].graph
        same = [n.name for n in names.nodes] == [n.name for n in graph.nodes]
        if not same:  # other layers are joined: bring all, by the old plan
            self._bring(
                {name: first for name, (first, _) in old.items()},
                optimizers,
                "bringing parameters",
            )
        self._carry_out(graph, widths)
        if same:
            grown = {
                name: old[name][0]
                for name, (first, width) in widths.items()
                if first < old[name][0] or first + width > sum(old[name])
            }
            self._bring(grown, optimizers, "bringing parameters")
        for node in graph.nodes:
            if not self._runs(node.name):
                for parameter in node.module.parameters():
                    parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm together is at most ``max_norm``.

        As `torch.nn.utils.clip_grad_norm_`, which would see this rank's gradients
        alone. Every rank must call it; the norm before is returned.
        """
        if not self._steps:
            raise StrettoError("there are no gradients before the first forward")
        graph = self._steps[True].graph
        total = params.gradient_norm(
            self._links, graph, self._widths, float(norm_type), self._device_used
        )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        params.scale_gradients(self.module.parameters(), factor)
        return total

    # Measuring.

    def measure(self, steps: int) -> None:
        """Times layers in the next ``steps`` steps, see `measured` and `waiting`."""
        if steps < 1:
            raise SpecError(f"steps must be >= 1, got {steps}")
        self._timings.start(steps)

    def measured(self) -> list[LayerTiming]:
        """Each layer's median times on this rank; layers not run here are left out."""
        return self._timings.layers()

    def waiting(self) -> dict[str, float]:
        """Seconds of a measured step in which this rank had nothing to compute.

        By what it waited for, medians; ``total`` is that of their sum.
        """
        return self._timings.waiting()

    @property
    def widths(self) -> dict[str, Width]:
        """Each layer's ranks: the first, and how many. Empty before a first forward."""
        return dict(self._widths)


def _digest(plan: BurstPlan) -> str:
    text = repr((plan.profile_digest, plan.gpus, plan.layers))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
