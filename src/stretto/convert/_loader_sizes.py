"""Sizes that a script reads from a divided loader, such as ``loader.batch_size``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._divided import DividedIterables
from stretto.convert._edit import theirs
from stretto.convert._shown import Shown
from stretto.convert._tree import found

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._loaders import Loaders


def convert(work: Work, loaders: Loaders) -> list[cst.BaseExpression]:
    """Make sizes of divided loaders those of all ranks together, or list them.

    A divided loader's ``batch_size`` and its sampler's length are this rank's part. In
    a step that is what the tensors hold, but a schedule or a mean over an epoch counts
    the samples of all ranks.

    Args:
        work: The script.
        loaders: The loaders that were divided.

    Returns:
        The expressions that became the batch size of all ranks.
    """
    sizes = _LoaderSizes(work, loaders)
    sizes.convert()
    return sizes.whole


@final
class _LoaderSizes:
    def __init__(self, work: Work, loaders: Loaders) -> None:
        self._work, self._tree = work, work.tree
        self._loaders = loaders
        self._steps = {id(node) for node in loaders.steps}
        self.whole: list[cst.BaseExpression] = []
        """The expressions that became the batch size of all ranks."""
        self._shown = Shown(work.tree)
        events: dict[int, list[cst.CSTNode]] = {}
        for loop in found(work.tree.module, (cst.For, cst.CompFor)):
            events.setdefault(id(work.tree.function(loop)), []).append(loop)
        self._iterables = DividedIterables(work, loaders, events)

    def convert(self) -> None:
        for node in found(self._tree.module, cst.Attribute):
            if any(id(a) in self._steps for a in self._tree.ancestors(node)):
                self._in_a_step(node)
            elif node.attr.value == "batch_size":
                if not self._work.choices.per_rank_batch:
                    self._batch_size(node)
            elif node.attr.value == "sampler":
                self._sampler(node)

    def _batch_size(self, node: cst.Attribute) -> None:
        loader = node.value
        if isinstance(loader, cst.Attribute) and loader.attr.value == "batch_sampler":
            loader = loader.value
        kept = self._of_divided(loader)
        if kept is None:
            return
        text = self._tree.text(node)
        if kept:
            self._work.replace(node, f"({text} * WORLD_SIZE)")
            done = "multiplied by the number of ranks"
        else:
            self._work.replace(
                node, f"whole_batch_size({theirs(self._tree.text(loader))})"
            )
            done = "taken times the number of ranks where the loader is divided"
        self._work.done(node, f"`{text}` is this rank's part of the batch: {done}")
        self._work.whole.add(node)
        self.whole.append(node)

    def _in_a_step(self, node: cst.Attribute) -> None:
        """List a batch's number times its size: the samples of all ranks so far."""
        product = self._tree.parent(node)
        if (
            node.attr.value == "batch_size"
            and isinstance(product, cst.BinaryOperation)
            and isinstance(product.operator, cst.Multiply)
            and not self._work.choices.per_rank_batch
            and self._of_divided(node.value) is not None
            and not self._shown.only(node)
        ):
            other = product.right if product.left is node else product.left
            if not self._numbers.isdisjoint(n.value for n in found(other, cst.Name)):
                self._list(node)

    @cached_property
    def _numbers(self) -> set[str]:
        """The variables that number the batches of training loops."""
        return {
            name.value
            for loop in self._work.job.training
            if isinstance(loop.node, cst.For)
            and self._tree.called(loop.node.iter) == "enumerate"
            and isinstance(loop.node.target, cst.Tuple)
            for name in found(loop.node.target.elements[0], cst.Name)
        }

    def _list(self, node: cst.Attribute) -> None:
        text = self._tree.text(node)
        self._work.undecided(
            node,
            f"`{text}` is this rank's part of the batch, since the loader is divided: "
            f"the batch of all ranks is `{text} * WORLD_SIZE`",
        )

    def _sampler(self, node: cst.Attribute) -> None:
        kept = self._of_divided(node.value)
        if kept is None:
            return
        text = self._tree.text(node)
        call = self._tree.parent(self._tree.parent(node) or node)
        if kept and isinstance(call, cst.Call) and self._tree.called(call) == "len":
            whole = f"{self._tree.text(node.value)}.dataset"
            self._work.replace(node, whole)
            self._work.done(
                node,
                f"`{text}` has this rank's samples only: `len({whole})` counts those "
                "of all ranks",
            )
            return
        self._work.undecided(
            node,
            f"`{text}` has this rank's samples only, since the loader is divided",
        )

    def _of_divided(self, loader: cst.BaseExpression) -> bool | None:
        """Return whether a loader is divided in all calls, ``None`` if in none."""
        taken = self._work.job.batches.taken(loader, self._tree.function(loader))
        divided = [self._loaders.has_divided([origin]) for origin in taken]
        if any(divided):
            return all(divided)
        return False if self._iterables.is_divided(loader) else None
