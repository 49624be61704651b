"""List decisions by which ranks would stop taking equal steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import found

if TYPE_CHECKING:
    from stretto.convert._replica_notes import ReplicaNotes

_PASSED_ON = ("KeyboardInterrupt", "StopIteration", "SystemExit")
"""Errors that do not come from a step of one rank."""


@final
class RankDecisions:
    """Decisions on clocks and random numbers, and errors that are skipped."""

    def __init__(self, on: ReplicaNotes) -> None:
        self._note, self._short = on.note, on.short
        self._work, self._tree = on.work, on.work.tree
        self._models, self._values, self._sources = on.models, on.values, on.sources

    def decision(self, node: cst.If | cst.While) -> None:
        """List a decision on a clock or a random number."""
        if not self._values.steers(node):
            return
        scope = self._tree.function(node)
        clock = self._sources.reached(node.test, scope, self._sources.is_clock)
        if clock is not None:
            self._note(
                node,
                f"this decides on the clock (`{self._short(clock)}`), which differs by "
                "rank: if ranks take different branches here, they hang waiting for "
                "each other. Let rank 0 decide, and broadcast it",
            )
        elif (uneven := self._is_uneven(node.test)) is not None:
            self._note(
                node,
                f"this decides on `{self._short(uneven)}`, which is equal on all ranks "
                "only if all have drawn equally often, but the samples of a rank draw "
                "from it too: if ranks take different branches here, they hang waiting "
                "for each other. Use a generator of its own, random.Random(seed)",
            )
        elif not self._has_draw(node.test):
            drawn = self._sources.draw(node.test, scope)
            if drawn is not None:
                self._note(
                    node,
                    f"this decides on a number drawn by `{self._short(drawn)}`, which "
                    "differs by rank: if ranks take different branches here, they hang "
                    "waiting for each other",
                )

    def choice(self, node: cst.IfExp) -> None:
        """List a choice between models that ranks may make differently."""
        scope = self._tree.function(node)
        chosen = (node.body, node.orelse)
        if self._sources.is_in_step(node) and any(
            self._models.is_model(part, scope) for part in chosen
        ):
            drawn = self._sources.draw(node.test, scope)
            if drawn is not None or self._values.differs(node.test):
                self._note(
                    node,
                    f"`{self._short(node)}` chooses a model by a value that differs by "
                    "rank: if ranks train different models, they hang waiting for each "
                    "other. Choose with `random`, or let rank 0 choose",
                )

    def _is_uneven(self, node: cst.BaseExpression) -> cst.Call | None:
        """Return a draw of `random` or NumPy that samples of a rank also make."""
        for call in found(node, cst.Call):
            library = self._library(call)
            for function in self._tree.functions if library else ():
                if function.name.value in ("__getitem__", "__call__") and any(
                    self._library(c) == library for c in found(function, cst.Call)
                ):
                    return call
        return None

    def _library(self, call: cst.Call) -> str:
        full = self._tree.called(call)
        names = ("random.", "numpy.random.")
        return next((n for n in names if full.startswith(n)), "")

    def _has_draw(self, node: cst.BaseExpression) -> bool:
        return any(self._sources.is_draw(call) for call in found(node, cst.Call))

    def attempt(self, block: cst.Try) -> None:
        """List a step whose error on one rank is skipped, while the others wait."""
        inside = [c for c in self._work.job.backwards if self._tree.within(c, block)]
        inside = [c for c in inside if self._tree.within(c, block.body)]
        around = any(
            self._tree.within(loop.node, block) for loop in self._work.job.training
        )
        if not inside or around:
            return
        for handler in block.handlers:
            kind = self._tree.text(handler.type) if handler.type is not None else ""
            leaves = any(True for _ in found(handler.body, cst.Raise)) or any(
                self._tree.called(c) in ("sys.exit", "exit", "quit", "os._exit")
                for c in found(handler.body, cst.Call)
            )
            if kind.rpartition(".")[2] not in _PASSED_ON and not leaves:
                self._note(
                    handler,
                    "an error in a step is skipped here: if it happens on one rank "
                    "only, the others hang waiting for its gradients. Let the error "
                    "end the training",
                )
