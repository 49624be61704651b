"""Bring parameters to the ranks that need them: for a refresh or another plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, final

from stretto.burst import parameters as params
from stretto.burst.checks.optimizers import first_difference, kept_outside
from stretto.burst.requirements import loaded, require_optimizers
from stretto.burst.schedule import rank_ranges_of
from stretto.errors import CommTimeout, StrettoError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from stretto.burst.parts import Parts
    from stretto.burst.plan_follower import PlanFollower
    from stretto.burst.rank_groups import RankRange
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.schema.burst import BurstPlan


@final
class PlanChange:
    """Moves the parameters of one model and changes its plan. All calls are collective.

    Args:
        parts: of the model.
        follower: of its plan.
    """

    def __init__(self, parts: Parts, follower: PlanFollower) -> None:
        self._parts = parts
        self._follower = follower

    # The same parameters on all ranks.

    def refresh(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Give this rank the parameters and buffers of layers that it does not run.

        With optimizers, their states too.
        """
        self._parts.seam.require_in_use()
        self._meet_to_refresh(optimizers)
        self._require_equal_copies()
        if optimizers:
            self._require_nothing_else(optimizers)
        widths = self._parts.ownership.widths
        self._bring({name: first for name, (first, _) in widths.items()}, optimizers)
        self._parts.stale_guard.refreshed(optimizers)

    def _meet_to_refresh(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Check that all ranks make this call before anything is sent.

        Gloo ends the process if one rank's message has another size than its peer's,
        such as those of a forward and a refresh.

        Raises:
            CommTimeout: some ranks make another call.
            SpecError: something else was passed.
            RankDisagreement: ranks pass different numbers of optimizers.
        """
        if self._parts.ranks.size == 1:
            require_optimizers(optimizers)
            return
        rank_groups = self._parts.rank_groups
        if rank_groups.failures.error is not None:
            raise rank_groups.failures.error
        rank_groups.refusals.withdraw()
        purpose = f"refresh a burst model with {len(optimizers)} optimizers"
        # States are sent by parameter, so each optimizer must hold the same ones.
        held = [
            sum(len(group["params"]) for group in getattr(found, "param_groups", ()))
            for found in optimizers
        ]
        counts = ", ".join(map(str, held)) or "none"
        try:
            self._parts.meeting.succeed_together(
                purpose,
                lambda: require_optimizers(optimizers),
                {"the optimizers' parameters": counts},
            )
        except CommTimeout as exc:
            rank_groups.end(
                f"{exc} Every rank must call refresh() and full_state_dict(), as "
                "often and in the same place: ranks make different calls"
            )
            assert rank_groups.failures.error is not None  # noqa: S101
            raise rank_groups.failures.error from None

    def _require_equal_copies(self) -> None:
        """Compare a sample of every parameter that several ranks hold.

        Also compare the factors of gradients since the last forward, the use of
        optimizers, hooks and buffers.
        """
        parts = self._parts
        if parts.ranks.size == 1:
            return
        checks = (
            (parts.backwards.next_values(), parts.backwards.require_equal),
            (parts.hooks.next_values(), parts.hooks.require_equal),
            (parts.constants.next_values(), parts.constants.require_equal),
            (parts.uses.next_values(), parts.uses.require_equal),
            (parts.replicas.all_values(), parts.replicas.require_all_equal),
            (parts.changes.next_values(), parts.changes.require_equal),
        )
        with parts.rank_groups.guard("comparing the ranks' copies"):
            mine = [number for values, _ in checks for number in values]
            rows = parts.rank_groups.exchange(mine)
        for values, require in checks:
            require([row[: len(values)] for row in rows])
            rows = [row[len(values) :] for row in rows]

    def _require_nothing_else(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Require that optimizers differ by rank only in their ``state``.

        Raises:
            StrettoError: on all ranks, naming what differs.
        """
        ranks = self._parts.ranks
        if ranks.size == 1:
            return
        with self._parts.stale_guard.opened():
            mine = json.dumps(kept_outside(optimizers))
        place = "comparing what optimizers keep"
        texts = self._parts.meeting.gather(
            "compare what optimizers keep", mine, place=place
        )
        found = first_difference([json.loads(text) for text in texts])
        if found is None:
            return
        raise StrettoError(
            f"{found[0]} differs between {ranks.name_all((0, found[1]))}: only "
            "the values in optimizer.state are sent to other ranks. Keep it there by "
            "parameter, or set it to the same value on all ranks"
        )

    def _bring(
        self, roots: Mapping[str, int], optimizers: tuple[Optimizer, ...]
    ) -> None:
        """Send parameters, buffers and optimizer states of layers from their roots."""
        parts = self._parts
        graph = parts.captures.planned
        with parts.stale_guard.opened():
            params.bring(parts.rank_groups, graph, roots, "sending parameters")
            params.bring_states(
                parts.rank_groups, graph, roots, optimizers, parts.device
            )

    def _bring_gradients(self, roots: Mapping[str, int]) -> None:
        parts = self._parts
        with parts.stale_guard.opened():
            params.bring_gradients(parts.rank_groups, parts.captures.planned, roots)

    # Another plan.

    def apply(
        self, plan: BurstPlan | str | Path, optimizers: tuple[Optimizer, ...]
    ) -> None:
        """Follow another plan, and receive what its layers need.

        This covers the given optimizers and those that have taken a step.
        """
        self._parts.seam.require_in_use()
        parts = self._parts
        purpose = "begin to apply a burst plan"
        parts.rank_groups.refusals.withdraw()

        def checked() -> BurstPlan:
            require_optimizers(optimizers)
            return loaded(plan)

        new = parts.meeting.succeed_together(purpose, checked)
        if not parts.captures:
            self._follower.plan = new
            return
        known = [o for o in parts.stale_guard.optimizers() if o not in optimizers]
        every = (*optimizers, *known)
        graph, widths = self._agree(new, every)
        self._hand_over(graph, widths, every)
        for node in graph.nodes:
            if not parts.ownership.runs(node.name):
                for parameter in node.module.parameters():
                    parameter.grad = None

    def _agree(
        self, plan: BurstPlan, optimizers: tuple[Optimizer, ...]
    ) -> tuple[LayerGraph, dict[str, RankRange]]:
        """Return a plan's layers and their ranks, if all ranks can follow it.

        Raises:
            StrettoError: one can't; the old plan is kept.
        """
        captures, backward = self._parts.captures, self._parts.backward
        before = self._follower.plan
        graph, widths = captures.planned, self._parts.ownership.widths
        trouble: StrettoError | None = None
        self._follower.plan = plan
        try:
            assert backward.sync is not None  # noqa: S101
            backward.sync.require_nothing_kept("apply_plan was called")
            with self._parts.hooks.set_aside():
                graph = captures.capture_for(plan)
            self._parts.hooks.note_checked(self._parts.module, graph.proven)
            widths = rank_ranges_of(plan, graph, self._parts.ranks.size)
        except StrettoError as exc:
            trouble = exc
        try:
            more = f", {len(optimizers)} optimizers"
            self._follower.meet("apply a burst plan", graph, trouble, more=more)
            if optimizers:
                self._require_nothing_else(optimizers)
        except StrettoError:
            self._follower.plan = before
            raise
        return graph, widths

    def _hand_over(
        self,
        graph: LayerGraph,
        widths: dict[str, RankRange],
        optimizers: tuple[Optimizer, ...],
    ) -> None:
        """Follow the new layers; send what their ranks need, gradients included."""
        old, planned = self._parts.ownership.widths, self._parts.captures.planned
        if [n.name for n in planned.nodes] != [n.name for n in graph.nodes]:
            # Other layers are joined: send everything, by the old plan.
            roots = {name: first for name, (first, _) in old.items()}
            self._bring(roots, optimizers)
            self._bring_gradients(roots)
            self._follower.follow(graph, widths)
            return
        self._follower.follow(graph, widths)
        grown = {
            name: old[name][0]
            for name, (first, width) in widths.items()
            if first < old[name][0] or first + width > sum(old[name])
        }
        self._bring(grown, optimizers)
        self._bring_gradients(grown)
