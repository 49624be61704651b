"""Find what a number in a step is: the loader's batch size, or this rank's."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._number_forms import (
    LENGTH,
    SHAPE,
    UNRELATED,
    Form,
    Forms,
    NumberForms,
    number,
    roots,
)
from stretto.convert._tree import dotted

if TYPE_CHECKING:
    from stretto.convert._edit import Work


_SMALL = 2
"""Sizes of batches that steps leave out for another reason, such as batch norm's."""


class BatchShare(enum.Enum):
    """Whether a number of a step is the batch size of all ranks."""

    ALL_RANKS = "the loader's batch size"
    OTHER = "another number, such as the length of this rank's batch"
    EITHER = "one of them, which the file does not say"


@final
class BatchNames:
    """The numbers that are the batch size of the training loaders.

    Args:
        work: The script.
        sizes: The batch sizes of divided loaders, as the script writes them.
        loaders: The calls that make divided loaders whose size ``**`` of a dict gives,
            or something else that is not in the call.
        in_steps: The functions that a step runs.
    """

    def __init__(
        self,
        work: Work,
        sizes: list[cst.BaseExpression],
        loaders: list[cst.BaseExpression],
        in_steps: list[cst.FunctionDef],
    ) -> None:
        self._work, self._tree = work, work.tree
        self._in_steps = {id(f) for f in in_steps}
        self._forms = NumberForms(work, self._is_of_a_step)
        given = [self._forms.of(size) for size in sizes]
        for call in loaders:
            made = (
                self._forms.of_argument(call, 1, "batch_size")
                if isinstance(call, cst.Call)
                else frozenset()
            )
            given.append(made)
        self._is_unknown = any(not _written(forms) for forms in given) or any(
            form[0] == "item" for forms in given[len(sizes) :] for form in forms
        )
        self._are_numbers = all(
            forms and all(number(form) is not None for form in forms) for forms in given
        )
        self._whole: Forms = frozenset().union(*given) - UNRELATED
        self._roots = {root for form in self._whole for root in roots(form)}
        self.numbers = {n for form in self._whole if (n := number(form)) is not None}
        """The batch sizes that are written as numbers, except 1."""
        self.numbers -= {n for n in self.numbers if n < 2}

    def of(self, node: cst.BaseExpression) -> BatchShare:
        """Return what a number is."""
        forms = self._forms.of(node)
        if not forms:
            return BatchShare.EITHER
        if forms <= self._whole | {("constant", n) for n in self.numbers}:
            return BatchShare.ALL_RANKS
        related = any(self._may_be_whole(form) for form in forms)
        return BatchShare.EITHER if related else BatchShare.OTHER

    def may_be_whole_in_comparison(self, node: cst.BaseExpression) -> bool:
        """Return whether a number that is compared with a length may be the batch size.

        If the script does not write the batch size as a number, any other number that
        a batch's length is compared with may be equal to it.
        """
        share = self.of(node)
        if share is not BatchShare.OTHER or self._are_numbers:
            return share is BatchShare.EITHER
        return not any(
            (given := number(form)) is not None and given <= _SMALL
            for form in self._forms.of(node)
        ) and not any(
            root in UNRELATED for form in self._forms.of(node) for root in roots(form)
        )

    def is_shape(self, node: cst.BaseExpression) -> bool:
        """Return whether something is the shape of a tensor."""
        return self._forms.of(node) == {SHAPE}

    def is_length(self, node: cst.BaseExpression) -> bool:
        """Return whether a number is the number of samples of a rank's batch."""
        return self._forms.of(node) == {LENGTH}

    def has_length(self, node: cst.BaseExpression) -> bool:
        """Return whether a number is computed from that of a rank's batch."""
        return any(
            root == LENGTH for form in self._forms.of(node) for root in roots(form)
        )

    def why_unclear(self, node: cst.BaseExpression, *, named: bool) -> str:
        """Return why a number may be the batch size of all ranks, or not.

        Args:
            node: The number.
            named: Whether it has the name of the loader's batch size.
        """
        line = self._line_of_another(node)
        if line is not None and named:
            return f"line {line} sets it too"
        forms = self._forms.of(node)
        of = {root for form in forms for root in roots(form)}
        if any(number(form) in self.numbers for form in forms):
            return "it is the same number as the loader's batch size"
        if not of.isdisjoint(self._roots) or self._is_sequence(forms):
            return "it is computed from the loader's batch size"
        if any(root[0] == "parameter" for root in of):
            return "its calls differ"
        return "the file does not show what the loader's batch size is"

    def is_part(self, node: cst.BaseExpression) -> bool:
        """Return whether the batch size is only a part of a number or a shape."""
        forms = self._forms.of(node)
        if self._is_sequence(forms):
            return True
        return any(form[0] == "op" for form in forms) and not forms <= self._whole

    def _is_sequence(self, forms: Forms) -> bool:
        made = [self._forms.node_of(form) for form in forms]
        return any(isinstance(node, cst.Tuple | cst.List) for node in made)

    def _line_of_another(self, node: cst.BaseExpression) -> int | None:
        """Return a line that sets a name to something else than the loader's size."""
        path = dotted(node)
        if not isinstance(node, cst.Name | cst.Attribute) or path is None:
            return None
        lines = [
            self._tree.shown_line(made.node)
            for made in self._forms.bindings.reaching(node)
            if made.node is not None
            and made.parameter is None
            and not self._forms.of_binding(made, path) <= self._whole
        ]
        return min(lines, default=None)

    def _may_be_whole(self, form: Form) -> bool:
        """Return whether the script does not show that a number is another one."""
        if form in UNRELATED:
            return False
        if number(form) in self.numbers:
            return True
        of = list(roots(form))
        if any(root in self._roots or root[0] == "parameter" for root in of):
            return True
        made = self._forms.node_of(form)
        if isinstance(made, cst.Tuple | cst.List):
            first = made.elements[:1]
            return any(self.of(e.value) is not BatchShare.OTHER for e in first)
        known = ("int", "bound", "path")
        return self._is_unknown and any(
            root not in UNRELATED and root[0] not in known for root in of
        )

    def _is_of_a_step(self, node: cst.CSTNode) -> bool:
        scope = self._tree.function(node)
        return (scope is not None and id(scope) in self._in_steps) or any(
            self._tree.within(node, loop.node.body) for loop in self._work.job.training
        )


def _written(forms: Forms) -> bool:
    """Return whether the file shows what a number is, or where it comes from."""
    return bool(forms) and all(form[0] != "parameter" for form in forms)
