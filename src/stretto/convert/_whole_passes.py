"""Keep loaders whole for code outside of training steps.

A divided loader gives each rank its part of each batch, which is right in a training
step. A script may also read a first batch before its loops, for its size or its mean,
or go through all batches for statistics. The results must equal those of one process,
so there each rank reads all samples. Called by `stretto.convert._script`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._loop_sums import LoopSums
from stretto.convert._models import reaching_training
from stretto.convert._tree import (
    argument,
    arguments_of,
    dotted,
    found,
    stored_names,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._flow import Origin
    from stretto.convert._loaders import Loaders
    from stretto.convert._models import Models
    from stretto.convert._tree import Scope

_Source = tuple[cst.BaseExpression, "Scope"]

_Pass = cst.For | cst.CompFor | cst.Call | cst.StarredElement

_KEEPING = frozenset(
    [
        *("to", "cuda", "cpu", "float", "double", "half", "long", "int", "type"),
        *("detach", "clone", "contiguous", "requires_grad_", "numpy"),
    ]
)
"""Methods that keep a tensor's first dimension."""


_CONSUMING = frozenset(
    [
        *("list", "tuple", "map", "filter", "dict", "sorted", "max", "min", "sum"),
        *("collections.deque", "functools.reduce", "itertools.starmap"),
    ]
)
"""Functions that go through all batches of a loader."""

_LAZY = ("itertools.", "more_itertools.", "torch.utils.data.")
"""Modules whose functions return iterables from which a step may take batches."""


def convert(work: Work, models: Models, loaders: Loaders) -> list[cst.BaseExpression]:
    """Give all samples to passes that neither train nor only add up numbers.

    Returns:
        The expressions that are the size of a batch of all ranks.
    """
    passes = _WholePasses(work, models, loaders)
    passes.convert()
    return list(passes.sizes())


@final
class _WholePasses:
    def __init__(self, work: Work, models: Models, loaders: Loaders) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._loaders = loaders
        self._models = models
        self._sums = LoopSums(work, models)
        self._reaching = reaching_training(work)
        self._steps = {id(node) for node in loaders.steps}
        training = work.job.training
        self._trains = {id(loop.node) for loop in training}
        self._taken = {id(source) for loop in training for source, _ in loop.loaders}
        self._optimizers = {id(o.call) for o in work.job.optimizers}
        self._wrapped: set[int] = set()

    def convert(self) -> None:
        nodes: Iterator[_Pass]
        kinds = (cst.For, cst.CompFor, cst.Call, cst.StarredElement)
        nodes = found(self._tree.module, kinds)
        for node in nodes:
            if isinstance(node, cst.For):
                sources = self._of_loop(node)
            elif isinstance(node, cst.CompFor):
                sources = self._work.job.batches.sources(
                    node.iter, self._tree.function(node)
                )
            elif isinstance(node, cst.StarredElement):
                if self._gets_a_list(node):
                    continue
                sources = self._work.job.batches.sources(
                    node.value, self._tree.function(node)
                )
            else:
                sources = self._of_call(node)
            if not sources or not self._is_outside(node):
                continue
            if self._can_be_whole(sources):
                self._make_whole(node, sources)
            elif all(self._is_equal(source, scope) for source, scope in sources):
                self._work.whole.add(node)

    def _gets_a_list(self, node: cst.StarredElement) -> bool:
        """Return whether a starred name gets a list, as in ``a, *rest = values``."""
        below: cst.CSTNode = node
        for above in self._tree.ancestors(node):
            if not isinstance(above, cst.Tuple | cst.List | cst.BaseElement):
                loop = isinstance(above, cst.For | cst.CompFor)
                return isinstance(above, cst.AssignTarget) or (
                    loop and getattr(above, "target", None) is below
                )
            below = above
        return False

    def _of_call(self, node: cst.Call) -> list[_Source]:
        """Return the loaders from which a call takes batches, one or all."""
        batches, scope = self._work.job.batches, self._tree.function(node)
        if dotted(node.func) == "next":
            return batches.sources(node.args[0].value, scope) if node.args else []
        consumes = self._tree.called(node) in _CONSUMING or self._is_foreign(node)
        if not consumes or self._applies_training(node):
            return []
        return [
            source
            for given in node.args
            for source in batches.sources(given.value, scope)
        ]

    def _is_foreign(self, node: cst.Call) -> bool:
        """Return whether a function of another file is called that does not train."""
        full, path = self._tree.called(node), dotted(node.func)
        last = full.rpartition(".")[2]
        if path is None or full in WRAPPERS or not last.islower():
            return False
        first = path.partition(".")[0]
        if first not in self._tree.imported or full.startswith(_LAZY):
            return False
        return not last.startswith(("train", "fit")) and not any(
            id(origin.value) in self._optimizers
            for given in node.args
            for origin in self._flow.origins(given.value, self._tree.function(node))
        )

    def _applies_training(self, node: cst.Call) -> bool:
        """Return whether a call such as `map` gives batches to a training step."""
        return self._may_train(node) or any(
            f.name.value == dotted(a.value) for a in node.args for f in self._reaching
        )

    def _of_loop(self, node: cst.For) -> list[_Source]:
        """Return the loaders of a loop that is not one that adds up numbers."""
        loop = self._work.job.batches.loop(node)
        if loop is None or id(node) in self._trains or self._may_train(node):
            return []
        if not self._loaders.is_divided(loop):
            return []
        of_all = all(self._loaders.has_divided([o]) for o in loop.origins)
        uneven = self._tree.without_gradient(node) or not self._calls_model(node)
        if of_all and uneven and self._sums.why_not_summable(node) is None:
            # Each rank adds up numbers of its batches, which are then summed.
            self._work.shared.add(node)
            return []
        return loop.loaders

    def _calls_model(self, node: cst.For) -> bool:
        return any(
            self._models.is_model(call.func, self._tree.function(call))
            for call in found(node.body, cst.Call)
        )

    def _may_train(self, node: cst.CSTNode) -> bool:
        return any(
            call in self._work.job.backwards
            or any(f in self._reaching for f in self._flow.local(call))
            for call in found(node, cst.Call)
            if call not in self._work.job.batches.idle
        )

    def _is_outside(self, node: cst.CSTNode) -> bool:
        """Return whether no training step contains some code."""
        return not any(
            id(above) in self._steps or id(above) in self._trains
            for above in self._tree.ancestors(node)
        )

    def _can_be_whole(self, sources: list[_Source]) -> bool:
        """Return whether a divided loader is among them, and none that training takes.

        Such as an iterator from which steps continue.
        """
        if any(id(source) in self._taken for source, _ in sources):
            return False
        return any(
            self._loaders.has_divided(self._work.job.batches.taken(source, scope))
            for source, scope in sources
        )

    def _is_equal(self, source: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether a loader is not divided and gives all ranks equal batches."""
        taken = self._work.job.batches.taken(source, scope)
        return (
            id(source) not in self._taken
            and bool(taken)
            and not self._loaders.has_divided(taken)
            and all(_is_in_order(origin.value) for origin in taken)
        )

    def _make_whole(self, node: _Pass, sources: list[_Source]) -> None:
        self._work.whole.add(node)
        for source, scope in sources:
            if id(source) in self._wrapped or not self._loaders.has_divided(
                self._work.job.batches.taken(source, scope)
            ):
                continue
            self._wrapped.add(id(source))
            self._work.call_around(source, "undivided")
            self._work.done(
                node,
                f"`{self._tree.text(source)[:50]}` gives each rank all samples here, "
                "outside of the training steps, as in one process",
            )

    # Sizes of their batches

    def sizes(self) -> Iterator[cst.BaseExpression]:
        """Yield what is the number of samples of a batch of all ranks."""
        nodes: Iterator[cst.Call | cst.Attribute]
        nodes = found(self._tree.module, (cst.Call, cst.Attribute))
        for node in nodes:
            on = self._sized(node)
            if on is not None and self._is_outside(node) and self._is_whole(on, 6):
                above = self._tree.parent(node)
                indexed = isinstance(above, cst.Subscript) and above.value is node
                yield above if indexed and isinstance(above, cst.Subscript) else node

    def _sized(self, node: cst.Call | cst.Attribute) -> cst.BaseExpression | None:
        """Return whose size an expression is; an index other than 0 is another size."""
        above = self._tree.parent(node)
        if isinstance(above, cst.Subscript) and above.value is node:
            if self._tree.text(above.slice[0].slice) != "0":
                return None
        elif isinstance(node, cst.Attribute) and not isinstance(above, cst.Assign):
            return None
        if isinstance(node, cst.Attribute):
            return node.value if node.attr.value == "shape" else None
        if self._tree.called(node) == "len" and node.args:
            return node.args[0].value
        on = self._tree.method_called(node, "size")
        first = not node.args or self._tree.text(node.args[0].value) == "0"
        return on if first else None

    def _is_whole(self, node: cst.BaseExpression, depth: int) -> bool:
        """Return whether a value is of a batch that a rank takes whole."""
        while True:
            if node in self._work.whole:
                return True
            if isinstance(node, cst.Subscript):
                node = node.value
            elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
                if node.func.attr.value not in _KEEPING:
                    return False
                node = node.func.value
            else:
                break
        path = dotted(node)
        if path is None or depth == 0:
            return False
        if isinstance(node, cst.Name) and self._is_target(node):
            return True
        made: list[Origin] = self._flow.origins(node, self._tree.function(node))
        return any(
            o.value is not node and self._is_whole(o.value, depth - 1) for o in made
        )

    def _is_target(self, name: cst.Name) -> bool:
        scope = self._tree.function(name)
        return any(
            isinstance(loop, cst.For)
            and self._tree.function(loop) is scope
            and any(n.value == name.value for n in stored_names(loop.target))
            for loop in self._work.whole
        )


def _is_in_order(made: cst.CSTNode) -> bool:
    """Return whether a loader is made in place, and takes samples in their order."""
    if not isinstance(made, cst.Call):
        return False
    _, named = arguments_of(made)
    if any(a.star for a in made.args) or {"sampler", "batch_sampler"} & set(named):
        return False
    shuffle = argument(made, 2, "shuffle")
    return shuffle is None or dotted(shuffle) == "False"
