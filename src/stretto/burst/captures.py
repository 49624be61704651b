"""A burst model's captures: one for its plan, others for later modes and values."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from stretto.burst.graph import capture, check_again, check_hooks
from stretto.burst.schedule import execution_plan_of, later_widths
from stretto.burst.tracing.cached_values import FirstValues
from stretto.burst.tracing.reads import Ambient
from stretto.burst.tracing.source_lines import line_of_forward
from stretto.errors import PlanMismatch, SpecError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn

    from stretto.burst.checks.stale_guard import StaleParameterGuard
    from stretto.burst.ownership import Ownership
    from stretto.burst.rank_groups import RankRange
    from stretto.burst.schedule import ExecutionPlan
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.schema.burst import BurstPlan

_log = get_logger(__name__)

_MAX_GRAPHS = 8
"""Number of captures to keep: of training, evaluation, with autocast or without."""

_TIMES_TO_WARN = (8, 64, 512)

_MAX_FALSE = 3
"""Captures that turn out to be as before until forward is not run again."""

Trained = tuple[bool, ...]
"""Whether each parameter requires a gradient."""


@contextlib.contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Put a module into train mode temporarily."""
    was = [(part, part.training) for part in module.modules()]
    try:
        if not module.training:  # as train() would
            for part, _ in was:
                part.training = True
        yield
    finally:
        for part, flag in was:
            part.training = flag


@final
class Captures:
    """A module's captures, with the ranks and the execution plan of each.

    Args:
        module: the user's.
        ownership: the ranks of the plan's layers.
        stale_guard: opened while the module is recorded.
        device: of the module's parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        stale_guard: StaleParameterGuard,
        device: torch.device,
    ) -> None:
        self._module = module
        self._ownership = ownership
        self._stale_guard = stale_guard
        self._device = device
        self._example: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        self._graphs: list[LayerGraph] = []
        self._layers: list[str] = []
        self._widths_in: dict[LayerGraph, dict[str, RankRange]] = {}
        self._plans: dict[tuple[Trained, LayerGraph], ExecutionPlan] = {}
        self._recaptures = self._checks = 0
        self._reruns = True
        """Whether forward's code runs again before each step."""
        self._num_false = 0
        self._differing: set[int] = set()
        """Numbers of the captures that differ from what forward does, since the last
        capture."""
        self._changed_line = ""
        self._other_gradients: set[LayerGraph] = set()
        """Captures whose backward now leaves out other parameters than at capture."""
        self._first_values = FirstValues()

    @property
    def planned(self) -> LayerGraph:
        """The capture for which the plan was made."""
        return self._graphs[0]

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def __iter__(self) -> Iterator[LayerGraph]:
        return iter(self._graphs)

    def example_tensors(self) -> list[Tensor]:
        """Return the tensors of the example input."""
        args, kwargs = self._example
        return list(self.planned.arguments.tensors(args, dict(kwargs)))

    def use_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Capture with these arguments from now on."""
        self._example = args, kwargs

    def described_example(self) -> str:
        """Return the shapes and types of the example's samples, and plain values."""
        return ", ".join(
            f"{tuple(value.shape[1:])} of {str(value.dtype).removeprefix('torch.')}"
            if isinstance(value, Tensor)
            else repr(value)
            for value in pytree.tree_leaves(self._example)
            if isinstance(value, Tensor | bool | int | float | str | None)
        )

    def capture_for(self, plan: BurstPlan) -> LayerGraph:
        """Return the module's layers in train mode, joined as a plan names them.

        Raises:
            SpecError: the module can't be captured.
            PlanMismatch: the plan is for other layers.
        """
        with training(self._module), self._stale_guard.opened():
            graph = capture(self._module, *self._example)
            check_hooks(self._module, *self._example)
            return graph.joined([entry.layer for entry in plan.layers])

    def follow(self, graph: LayerGraph, widths: dict[str, RankRange]) -> None:
        """Start again with the capture of a plan."""
        self._graphs = [graph]
        self._layers = list(widths)
        self._widths_in = {graph: widths}
        self._plans = {}

    def forget(self) -> None:
        """Drop all captures: the model must be set up before it runs."""
        self._graphs, self._widths_in, self._plans = [], {}, {}

    def widths_in(self, graph: LayerGraph) -> dict[str, RankRange]:
        """Return the ranks of a capture's layers."""
        return self._widths_in[graph]

    def execution_plan(self, graph: LayerGraph, trained: Trained) -> ExecutionPlan:
        """Return how to run a capture while these parameters are trained."""
        key = trained, graph
        if key not in self._plans:
            self._plans[key] = execution_plan_of(graph, self._widths_in[graph])
        return self._plans[key]

    def current(self) -> LayerGraph | None:
        """Return the capture that holds for the current modes and values, if any."""
        ambient = Ambient.now(self._device)
        self._changed_line = ""
        for graph in self._graphs:
            if graph.ambient == ambient and self._outdated(graph) is None:
                if graph.changed_since(self._first_values) is not None:
                    return None
                if self._differs(graph):
                    continue
                if self._is_proven(graph):
                    return graph
        return None

    def _outdated(self, graph: LayerGraph) -> str | None:
        """Return a value that changed and that a run of its code does not show."""
        return graph.layers_outdated() if self.reruns(graph) else graph.outdated()

    def _differs(self, graph: LayerGraph) -> bool:
        """Return whether forward's code now does something else than was captured."""
        if not self._reruns:
            return False
        with self._stale_guard.opened():
            place = graph.rerun_difference()
        if place is not None:
            self._changed_line = place
            self._differing.add(graph.semantics_number)
        return place is not None

    def reruns(self, graph: LayerGraph) -> bool:
        """Return whether forward's code runs again before each step."""
        return self._reruns and graph.can_rerun

    def _is_proven(self, graph: LayerGraph) -> bool:
        """Return whether a capture that holds can be used; check it again if necessary.

        Raises:
            SpecError: its layers differ from the module, or mix samples.
        """
        if graph in self._other_gradients:
            return False
        if (changed := graph.unproven()) is None:
            return True
        if graph.ambient.autocast:
            plain = self._plain(graph.ambient)
            graph.note_proven(plain.proven)
            own, now = (g.results.unreached(self._module) for g in (graph, plain))
            if own != now:
                self._other_gradients.add(graph)
            return own == now
        begin = time.monotonic()
        try:
            with self._stale_guard.opened():
                is_usable = check_again(graph, self._module, *self._example)
        except SpecError as exc:
            raise SpecError(
                f"{exc}. This was found when the layers were checked again, because "
                f"{changed} changed after the burst model was built"
            ) from exc
        if not is_usable:
            self._other_gradients.add(graph)
        self._checks += 1
        if self._checks in _TIMES_TO_WARN:
            _log.warning(
                "the burst model's layers were checked again %d times, the last in "
                "%.2g s, because %s had changed: let hooks and backwards read what "
                "changes in each step from buffers of the model",
                self._checks,
                time.monotonic() - begin,
                changed,
            )
        return is_usable

    def _plain(self, ambient: Ambient) -> LayerGraph:
        """Return a checked capture of the module as it is, without autocast.

        Raises:
            SpecError: the module can't be captured.
        """
        plain = Ambient(grad=ambient.grad)
        for graph in self._graphs:
            is_valid = graph.ambient == plain and self._outdated(graph) is None
            is_valid = is_valid and not self._differs(graph)
            if is_valid and self._is_proven(graph):
                return graph
        with self._stale_guard.opened():
            return capture(self._module, *self._example, ambient=plain)

    def add(self, forget: Callable[[LayerGraph], None]) -> LayerGraph:
        """Capture the module in its current modes and state; local to this rank.

        Args:
            forget: called with a capture that is dropped, if there are too many.

        Raises:
            SpecError: the module can't be captured.
            PlanMismatch: its layers are no longer the plan's.
        """
        begin = time.monotonic()
        graph = self._capture_as_is()
        if (name := graph.changed_since(self._first_values)) is not None:
            raise SpecError(
                f"{line_of_forward(self._module)}forward of "
                f"{type(self._module).__name__} keeps {name} from its first "
                "call, and what that was computed from has changed since: one process "
                "would keep the first value, but layers compute it again. Compute it "
                "in each call, or keep it in a buffer"
            )
        self._note_false(graph)
        self._refuse_new_parameters(graph)
        widths, unknown = later_widths(
            graph, self.planned, self._ownership.widths, self._ownership.width_by_id
        )
        if unknown is not None:
            raise PlanMismatch(self._why_unknown(graph, unknown))
        self._widths_in[graph] = widths
        self._recaptures += 1
        if self._recaptures in _TIMES_TO_WARN:
            _log.warning(
                "the burst model was captured again %d times, the last in %.2g s, "
                "because %s: pass values that change in each step as an input tensor "
                "or keep them in a buffer",
                self._recaptures,
                time.monotonic() - begin,
                self._why_again(),
            )
        self._graphs.append(graph)
        if self._reruns:  # keeps what the first call keeps
            with self._stale_guard.opened():
                graph.rerun_difference()
        if len(self._graphs) > _MAX_GRAPHS:
            old = self._graphs.pop(1)
            del self._widths_in[old]
            self._plans = {k: p for k, p in self._plans.items() if k[1] is not old}
            forget(old)
        return graph

    def _why_again(self) -> str:
        """Return why the last capture no longer holds."""
        if (name := self._graphs[-1].outdated()) is not None:
            return f"{name!r}, which its forward reads, had changed"
        if self._changed_line:
            return f"its forward did something else at {self._changed_line}"
        return "a mode had changed"

    def _note_false(self, graph: LayerGraph) -> None:
        """Stop running forward again if its differences change no layer."""
        is_false = graph.semantics_number in self._differing
        self._differing.clear()
        self._num_false += is_false
        if is_false and self._num_false == _MAX_FALSE:
            self._reruns = False
            _log.warning(
                "forward of %s makes other calls again and again (%s), though its "
                "layers stay the same: its code is not compared before each step any "
                "more, and some changes of what it reads are noticed some steps later. "
                "Let it pass the same objects in each call; keep masks and other "
                "tensors that change in buffers",
                type(self._module).__name__,
                self._changed_line,
            )

    def _capture_as_is(self) -> LayerGraph:
        ambient = Ambient.now(self._device)
        with self._stale_guard.opened():
            # Low precision hides the differences that the check looks for.
            graph = capture(
                self._module,
                *self._example,
                ambient=ambient,
                verify=not ambient.autocast,
            )
            if ambient.autocast:
                plain = self._plain(ambient)
                graph.note_proven(plain.proven)
                graph.results.output_parameters = plain.results.output_parameters
            ambient = Ambient(grad=ambient.grad)
            check_hooks(self._module, *self._example, ambient=ambient)
        # There may be fewer layers: some run in training only.
        same = set(self._layers) == {node.name for node in graph.nodes}
        if not (self._module.training or same):
            return graph.apart_from(self.planned)
        if not same:
            graph = graph.named_like(self.planned)
        try:
            return graph.joined(self._layers)
        except PlanMismatch as exc:
            raise PlanMismatch(self._why_other_layers()) from exc

    def _why_other_layers(self) -> str:
        """Return why the model has no longer the plan's layers in training."""
        found = [self._outdated(known) or known.outdated() for known in self._graphs]
        changed = next((name for name in found if name), None)
        place = self._changed_line or self._first_difference()
        line = f"{place}: " if place else ""
        what = changed or ("what forward reads here" if line else "a mode")
        return (
            f"{line}{what} changed after the burst model was built, and the model "
            "now has different layers than its plan: build BurstParallel with a "
            "plan for these layers when it changes, let forward run the same "
            "layers throughout, such as with a rate of 0, or register hooks before "
            "the model is captured"
        )

    def _first_difference(self) -> str | None:
        """Return the first line at which forward differs from a capture, or None."""
        with self._stale_guard.opened():
            for known in self._graphs:
                with contextlib.suppress(SpecError):
                    if (place := known.difference()) is not None:
                        return place
        return None

    def _refuse_new_parameters(self, graph: LayerGraph) -> None:
        """Refuse a capture that reads parameters that the model did not have before.

        They are in a module that was added: see `Structure` for others.
        """
        for name, parameter in self._module.named_parameters():
            if self._ownership.layer_of(parameter) is None and any(
                parameter is held
                for node in graph.nodes
                for held in node.module.parameters()
            ):
                raise PlanMismatch(
                    f"{name!r} was added after the burst model was built, which does "
                    "not train it: build BurstParallel again after changing the module"
                )

    def _why_unknown(self, graph: LayerGraph, name: str) -> str:
        """Return why a layer of a later capture is not in the plan."""
        if self._module.training:
            return self._why_other_layers()
        parameters = graph.by_name[name].module.parameters()
        owners = (self._ownership.layer_of(p) for p in parameters)
        layer = next((owner for owner in owners if owner is not None), None)
        if layer is None:
            return (
                f"layer {name!r} runs in evaluation only, so it is missing from the "
                "plan: let the module run the same layers in both modes"
            )
        held = self.planned.layers_with(graph.by_name[name])
        if len({self._ownership.widths[each] for each in held}) > 1:
            return (
                f"{' and '.join(map(repr, held))} are one layer in evaluation, where "
                "nothing separates them (such as a dropout), but the plan runs them on "
                "different ranks: give these layers the same ranks in the plan, or "
                "build a second module for evaluation and load full_state_dict() into "
                "it"
            )
        return (
            f"layer {name!r} is part of layer {layer!r} in training, but not in "
            "evaluation, where the module runs fewer operations: operations that share "
            "a parameter, and what is between them, are one layer. Let the module run "
            "the same operations in both modes, or build a second module for "
            "evaluation and load full_state_dict() into it"
        )
