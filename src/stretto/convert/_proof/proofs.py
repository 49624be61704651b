"""Show that a loss is a mean over samples, or say which expression prevents it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._proof.batch_values import (
    Constant,
    Item,
    Linear,
    Rows,
    Unproved,
    Why,
)
from stretto.convert._proof.interpreter import Interpreter
from stretto.convert._result import Kind

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._proof.batch_values import Value


_logger = logging.getLogger(__name__)

_LISTED = (
    "combines the samples of a batch",
    "compares the samples of a batch",
    "a mean that leaves samples out",
    "a mean over samples weighted by class",
    "adds up losses or gradients",
    "this decides on",
)
"""Notes that say what prevents a mean already."""


@final
class Proofs:
    """Proofs about the losses of a script.

    A mean is shown by computing with abstract values, so a loss that cannot be followed
    is not taken for one.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._interpreter: Interpreter | None = None

    def _run(self) -> Interpreter:
        if self._interpreter is None:
            self._interpreter = Interpreter(self._work)
            try:
                self._interpreter.run()
            except Exception:  # too long or deep, or a bug, which ends no conversion
                _logger.debug("cannot follow the losses", exc_info=True)
                self._interpreter = Interpreter(self._work)  # a part shows nothing
        return self._interpreter

    def degree(self, call: cst.Call) -> int | None:
        """Return 0 for a mean over samples, 1 for a sum, ``None`` for neither.

        ``call`` is one of ``backward``.
        """
        value = self._run().losses.get(id(call))
        if isinstance(value, Linear) and not value.mixed and value.degree in (0, 1):
            return value.degree
        if isinstance(value, Rows) and value.trusted and not value.degree:
            return 0
        if isinstance(value, Constant) and value.grad:
            return 0
        return None

    def is_mixed(self, call: cst.Call) -> bool:
        """Return whether a loss adds a sum over samples to something else."""
        value = self._run().losses.get(id(call))
        return isinstance(value, Linear) and value.mixed

    def is_summed(self, node: cst.CSTNode) -> bool:
        """Return whether a loss is proved with a number of samples over all ranks."""
        return node in self._run().summed

    def number_degree(self, node: cst.CSTNode) -> int | None:
        """Return 0 for a number of a mean over samples, 1 for a sum, else ``None``.

        ``node`` is a call that takes the number of a tensor.
        """
        values = self._run().numbers.get(id(node), [])
        if Linear(0) in values:
            others = [v for v in values if v != Linear(0)]
            return 0 if all(isinstance(v, Constant) for v in others) else None
        return 1 if values == [Linear(1)] else None

    def is_rowwise(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is shown to treat each sample by itself."""
        return self._run().is_rowwise(node)

    def point_out(self) -> None:
        """List the losses that are not shown to be means or sums over samples."""
        if self._work.choices.per_rank_batch:
            return
        for draw in self._run().repeated:
            if self._work.tree.has(draw):
                text = " ".join(self._work.tree.text(draw).split())
                self._work.undecided(
                    draw,
                    f"`{text[:60]}` draws numbers for a rank's samples, and all ranks "
                    "draw the same ones (as NumPy and a generator with one seed do): "
                    "draw them with torch, or add the rank to the seed",
                )
        run = self._run()
        for layer in run.unsure - (run.batched - run.tested):
            if self._work.tree.has(layer):
                self._point_out_layer(layer)
        for call in self._work.job.backwards:
            if self.degree(call) is None:
                self._point_out(call, self._run().losses.get(id(call)))

    def _point_out_layer(self, layer: cst.Call) -> None:
        tree = self._work.tree
        value = layer.args[0].value if layer.args else None
        given = "its input" if value is None else tree.text(value)[:30]
        name = given if isinstance(value, cst.Name) else "NAME"
        self._work.undecided(
            layer,
            f"`{tree.text(layer)[:50]}` takes two dimensions for one sequence, and "
            f"how many `{given}` has is not shown: with two, the samples of a batch "
            "are one sequence, of which each rank has a part. With three, say so "
            f"before this line: `n, length, width = {name}.shape`",
        )

    def _point_out(self, call: cst.Call, value: Value | None) -> None:
        tree = self._work.tree
        node, why = _reason(call, value)
        if not tree.has(node):
            node = call
        line = tree.shown_line(node)
        if any(
            note.line == line
            and note.kind is Kind.OPEN
            and any(text in note.text for text in _LISTED)
            for note in self._work.notes
        ):
            return
        text = " ".join(tree.text(node).split())
        self._work.undecided(
            node,
            f"stretto could not show that this loss is a mean over samples: "
            f"`{text[:70]}` {why}. On N ranks the gradient is the average of the "
            "ranks' gradients: compare one step with one process, by printing a "
            "parameter's .grad.norm() after the first backward() without shuffling",
        )


def _reason(call: cst.Call, value: Value | None) -> tuple[cst.CSTNode, str]:
    """Return the expression that prevents a proof, and what it does."""
    if isinstance(value, Unproved):
        return value.node, value.why.value
    if isinstance(value, Rows) and value.opaque is not None:
        return value.opaque, Why.UNREAD.value
    if isinstance(value, Linear) and value.mixed:
        return call, Why.MIXED.value
    if isinstance(value, Linear):
        return call, "is divided or multiplied by a power of the number of samples"
    if isinstance(value, Item):
        return call, "is of each sample of a batch"
    return call, Why.UNREAD.value
