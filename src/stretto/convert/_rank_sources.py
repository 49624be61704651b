"""Sources of differences between ranks: random numbers, clocks, new modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._models import trained_functions
from stretto.convert._tree import argument, dotted, found

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.convert._edit import Work
    from stretto.convert._tree import Scope

    Source = Callable[[cst.Call], bool]
    """Returns whether a call is what is looked for."""

DRAWS = frozenset(
    [
        *(
            f"torch.{name}"
            for name in (
                "rand",
                "randn",
                "randint",
                "randperm",
                "rand_like",
                "randn_like",
                "randint_like",
                "normal",
                "bernoulli",
                "multinomial",
                "poisson",
            )
        ),
        "torch.utils.data.random_split",
        "torch.utils.data.dataset.random_split",
    ]
)
"""Functions that draw random numbers of torch."""

DRAWING_METHODS = (
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "trunc_normal_",
)
"""Methods that draw random numbers into a tensor."""

_CLOCKS = frozenset(
    [
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.perf_counter",
        "time.process_time",
        "timeit.default_timer",
        "datetime.now",
        "datetime.utcnow",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
    ]
)

_DEPTH = 4
"""Assignments and calls through which a value is followed."""


@final
class RankSources:
    """Calls whose results differ by rank, and where values come from.

    Args:
        work: The script and its edits.
        begins: The statement before which ranks begin to draw their own numbers.
    """

    def __init__(self, work: Work, begins: cst.CSTNode) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._begins = begins
        self._in_step = trained_functions(work)

    def draw(self, node: cst.BaseExpression, scope: Scope) -> cst.Call | None:
        """Return a draw by which ranks differ and that a value may come from."""
        return self.reached(node, scope, lambda c: self.is_draw(c) and self.is_late(c))

    def reached(
        self,
        node: cst.BaseExpression,
        scope: Scope,
        is_source: Source,
        depth: int = _DEPTH,
    ) -> cst.Call | None:
        """Return a call that a value may come from, through names and functions."""
        for call in found(node, cst.Call):
            if is_source(call):
                return call
        if depth == 0:
            return None
        for call in found(node, cst.Call):
            for function in self._flow.local(call):
                for value in self._flow.returned(function):
                    source = self.reached(value, function, is_source, depth - 1)
                    if source is not None:
                        return source
        for name in found(node, (cst.Name, cst.Attribute)):
            path = dotted(name)
            above = self._tree.parent(name)
            if path is None or (
                isinstance(above, cst.Attribute) and above.attr is name
            ):
                continue
            for origin in self._flow.assigned(path, scope):
                if self._tree.within(node, origin.statement):
                    continue
                source = self.reached(origin.value, origin.scope, is_source, depth - 1)
                if source is not None:
                    return source
        return None

    def is_draw(self, call: cst.Call) -> bool:
        """Return whether a call draws random numbers of torch."""
        generator = argument(call, -1, "generator")
        if generator is not None and self._tree.text(generator) != "None":
            return False
        full = self._tree.called(call)
        if full in DRAWS:
            return True
        if self._tree.method_called(call, *DRAWING_METHODS) is not None:
            return True
        on = self._tree.method_called(call, "sample", "rsample")
        return isinstance(on, cst.Call) and self._tree.called(on).startswith(
            "torch.distributions."
        )

    def is_new_module(self, call: cst.Call) -> bool:
        """Return whether a call makes a module with random numbers of this rank."""
        full = self._tree.called(call)
        last = full.rpartition(".")[2]
        of_torch = full.startswith("torch.nn.") and last[:1].isupper()
        kind = self._tree.own_class(call)
        is_module = kind is not None and any(
            (dotted(base.value) or "").endswith("Module") for base in kind.bases
        )
        if last in ("Parameter", "ParameterList") or not (of_torch or is_module):
            return False
        return self.is_late(call)

    def is_clock(self, call: cst.Call) -> bool:
        """Return whether a call reads a clock."""
        return self._tree.called(call) in _CLOCKS

    def is_in_step(self, node: cst.CSTNode) -> bool:
        """Return whether code may run in a training step."""
        if any(self._tree.within(node, t.node) for t in self._work.job.training):
            return True
        return any(a in self._in_step for a in self._tree.ancestors(node))

    def is_late(self, node: cst.CSTNode, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether code may run after ranks began to draw their own numbers."""
        scope = self._tree.function(node)
        if self._tree.within(node, self._begins):
            return True
        if scope is self._tree.function(self._begins):
            return self._tree.line(node) > self._tree.line(self._begins)
        if scope is None or id(scope) in seen:
            return False
        more = seen | {id(scope)}
        return any(self.is_late(call, more) for call in self._flow.calls_of(scope))
