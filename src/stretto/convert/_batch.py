"""Find where a step relies on the batch size of one process.

All ranks together take the script's batch, so the tensors of a step hold a part of it.
A shape or a comparison with the batch size must use this rank's part.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._batch_names import BatchNames, BatchShare
from stretto.convert._flow import parameters
from stretto.convert._held_tensors import HeldTensors
from stretto.convert._shown import Shown
from stretto.convert._tree import (
    argument,
    dotted,
    found,
    stored_names,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from stretto.convert._edit import Work

_MAKING = frozenset(
    f"torch.{name}"
    for name in (
        "zeros",
        "ones",
        "full",
        "empty",
        "rand",
        "randn",
        "randint",
        "normal",
        "arange",
        "randperm",
        "FloatTensor",
        "LongTensor",
        "cuda.FloatTensor",
        "Tensor",
    )
)
"""Functions that make a tensor from a shape, or from a length."""

_SHAPING = frozenset(
    [
        *("view", "reshape", "expand", "repeat", "new", "new_zeros", "new_ones"),
        *("new_full", "new_empty"),
    ]
)
"""Methods whose arguments are a shape."""

_KEEPING = ("to", "cuda", "cpu", "float", "double", "half", "long", "requires_grad_")
"""Methods that keep a tensor's shape."""

_COMPUTING = frozenset(
    ["min", "max", "float", "int", "round", "abs", "range", "print", "len", "str"]
)
"""Functions of numbers."""

_NAMES = (cst.Name, cst.Attribute, cst.Subscript)

_NUMPY = ("zeros", "ones", "full", "empty", "normal", "uniform", "randint", "randn")


@final
class Batch:
    """The batch size of the training loaders, in the steps that use it.

    Args:
        work: The script.
        sizes: The batch sizes of divided loaders, as the script writes them.
        loaders: The calls that make divided loaders without a written batch size.
        read: Expressions outside of the steps that are a batch size of all ranks, such
            as the length of a first batch.
    """

    def __init__(
        self,
        work: Work,
        sizes: list[cst.BaseExpression],
        loaders: list[cst.BaseExpression],
        read: Collection[cst.BaseExpression] = (),
    ) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._sized = {id(node) for node in read}
        self._texts = {self._tree.text(s) for s in sizes if isinstance(s, _NAMES)}
        self._shown = Shown(work.tree)
        self._names = BatchNames(work, sizes, loaders, list(called_in_steps(work)))

    def _is_literal(self, node: cst.BaseExpression) -> bool:
        return (
            isinstance(node, cst.Integer)
            and node.value.isdecimal()
            and int(node.value) in self._names.numbers
        )

    def convert(self) -> None:
        """Make the batch size in a step this rank's, or list where it is read."""
        if self._work.choices.per_rank_batch:
            return
        seen: set[int] = set()
        for loop in self._work.job.training:
            for call in found(loop.node.body, cst.Call):
                self._divide_arguments(call, seen)
        for loop in self._work.job.training:
            for node in found(loop.node.body, cst.BaseExpression):
                self._look(node, seen, in_step=True)
        for function in called_in_steps(self._work):
            for node in found(function.body, cst.BaseExpression):
                self._look(node, seen, in_step=False)
        for loop in self._work.job.training:
            for name in found(loop.node.body, cst.Name):
                if not (
                    self._tree.without_gradient(name) or self._is_aside(name, loop.node)
                ):
                    self._made_before(name, loop.node, seen)
        self._list_held(seen)

    def _list_held(self, seen: set[int]) -> None:
        """List tensors of the batch's size that objects and containers hold for steps.

        Such as ``self.one = torch.ones(self.bs, 1)`` or ``{"one": torch.ones(bs, 1)}``.
        """
        held = HeldTensors(self._work)
        for loop in self._work.job.training:
            every: Iterator[cst.Name | cst.Attribute]
            every = found(loop.node.body, (cst.Name, cst.Attribute))
            for node in every:
                if self._tree.without_gradient(node) or self._is_aside(node, loop.node):
                    continue
                if isinstance(node, cst.Attribute):
                    self._made_before(node, loop.node, seen)
                for call in held.of(node, loop.node):
                    if id(call) not in seen and self._tree.called(call) in _MAKING:
                        seen.add(id(call))
                        self._list_sizes(call)
        for function in called_in_steps(self._work):
            attributes: Iterator[cst.Attribute] = found(function.body, cst.Attribute)
            for attribute in attributes:
                for call in held.of(attribute, function):
                    if id(call) not in seen and self._tree.called(call) in _MAKING:
                        seen.add(id(call))
                        self._list_sizes(call, literals=False)

    def _made_before(
        self, name: cst.Name | cst.Attribute, loop: cst.CSTNode, seen: set[int]
    ) -> None:
        """List tensors of the batch's size that a step reads and an earlier line makes.

        Such as the hidden state ``torch.zeros(1, batch_size, width)`` of an epoch.
        """
        for origin in self._work.flow.origins(name, self._tree.function(name)):
            made = origin.value
            inside = id(made) in seen or any(x is loop for x in self._tree.loops(made))
            seen.add(id(made))
            if inside:
                continue
            while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute):
                if made.func.attr.value not in _KEEPING:
                    break
                made = made.func.value
            if not isinstance(made, cst.Call):
                continue
            if self._tree.called(made) in _MAKING:
                self._list_sizes(made)
            making = [f for f in self._methods(made) if self._makes_a_tensor(f)]
            if making and self._tree.called(made) not in _MAKING:
                self._divide_arguments(made, seen)
                for given in made.args:
                    if id(given.value) not in seen:
                        self._list_made(given.value, several=True)
            for function in making:
                params = {p.name.value for p in found(function.params, cst.Param)}
                for call in found(function.body, cst.Call):
                    if self._tree.called(call) in _MAKING:
                        self._list_sizes(call, params)

    def _divide_arguments(self, call: cst.Call, seen: set[int]) -> None:
        """Make the batch size this rank's where a call only makes tensors of it.

        Such as ``model.init_hidden(batch_size)``. A tensor of all ranks' batch would
        not fit the others of a step.
        """
        functions = list(self._methods(call))
        for place, given in enumerate(call.args):
            node = given.value
            if not (self._is_named(node) or self._is_size(node)) or given.star:
                continue
            reads = [list(self._reads(f, place, given.keyword)) for f in functions]
            if not reads or not all(reads):
                continue
            if not all(self._place(n) is not None for names in reads for n in names):
                continue
            text = self._tree.text(node)
            self._work.call_around(node, "per_rank")
            self._work.divided.add(node)
            self._work.done(
                node,
                f"`{self._tree.text(call)[:40]}` makes tensors of this rank's part of "
                f"the batch: {text} became per_rank({text})",
            )
            seen |= {id(node), *(id(n) for names in reads for n in names)}

    def _reads(
        self, function: cst.FunctionDef, place: int, keyword: cst.Name | None
    ) -> Iterator[cst.Name]:
        """Return where a function reads one of a call's arguments."""
        names = parameters(function)
        if names and names[0] in ("self", "cls") and self._tree.owner(function):
            names = names[1:]
        name = names[place] if place < len(names) else ""
        if keyword is not None:
            name = keyword.value
        for node in found(function.body, cst.Name):
            if node.value == name and not self._tree.is_label(node):
                yield node

    def _is_aside(self, node: cst.CSTNode, loop: cst.CSTNode) -> bool:
        """Return whether a branch without ``backward`` reads a value: now and then."""
        here: cst.CSTNode | None = node
        while here is not None and here is not loop:
            if isinstance(here, cst.If) and not any(
                self._tree.method_called(c, "backward") is not None
                for c in found(here, cst.Call)
            ):
                return True
            here = self._tree.parent(here)
        return False

    def _list_sizes(
        self, made: cst.Call, listed: Collection[str] = (), *, literals: bool = True
    ) -> None:
        """List the batch's size in the shape of a tensor, except where it is listed."""
        several = literals and self._has_several_dimensions(made)
        for node in found(made, cst.BaseExpression):
            if dotted(node) not in listed and self._place(node) is not None:
                self._list_made(node, several=several)

    def _list_made(self, node: cst.BaseExpression, *, several: bool) -> None:
        literal = self._is_literal(node)
        if self._is_named(node) or self._is_size(node) or (literal and several):
            text = self._tree.text(node)
            self._work.undecided(
                node,
                f"whether {text} is the loader's batch size here: a step reads the "
                "tensor that this line makes, and its batch is this rank's part, "
                f"which is per_rank({text})",
            )

    def _has_several_dimensions(self, call: cst.Call) -> bool:
        given = [a.value for a in call.args if a.keyword is None]
        if given and isinstance(given[0], cst.Tuple | cst.List):
            given = [e.value for e in given[0].elements]
        return len(given) > 1

    def _methods(self, call: cst.Call) -> Iterator[cst.FunctionDef]:
        """Return the functions and methods of the script that a call may run."""
        yield from self._work.flow.local(call)
        if isinstance(call.func, cst.Attribute):
            for kind in self._tree.classes.values():
                for function in found(kind.body, cst.FunctionDef):
                    if function.name.value == call.func.attr.value:
                        yield function

    def _makes_a_tensor(self, function: cst.FunctionDef) -> bool:
        return any(
            self._tree.called(c) in _MAKING
            or self._tree.method_called(c, *_SHAPING) is not None
            for c in found(function.body, cst.Call)
        )

    def _look(self, node: cst.BaseExpression, seen: set[int], *, in_step: bool) -> None:
        if id(node) in seen:
            return
        literal = self._is_literal(node)
        named = read = not literal and self._is_named(node)
        place = self._place(node)
        compared = self._of_a_length(node)
        if self._has_its_name(node) and not named:
            self._list_unclear(node, seen, whole=compared or place is not None)
            return
        if not (literal or named) and (compared or place is not None):
            named = self._is_size(node)
        elsewhere = not literal and self._is_read_size(node)
        if not (named or literal or elsewhere):
            if self._decides_by_length(node) and self._names.has_length(node):
                self._list_condition(node, seen)
            elif compared or place == 0:
                sure = self._of_a_length(node, sure=True)
                self._list_unclear(node, seen, whole=True, compared=sure)
            return
        seen |= {id(inner) for inner in found(node, cst.BaseExpression)}
        if self._tree.without_gradient(node) and not in_step:
            return
        text = self._tree.text(node)
        sure = named or literal
        if sure and (compared or (place == 0 and (named or in_step))):
            self._work.call_around(node, "per_rank")
            self._work.divided.add(node)
            if named:
                self._work.done(
                    node, f"`{text}` in a step is this rank's part of the batch"
                )
            else:
                self._work.undecided(
                    node,
                    f"{text}, the loader's batch size, became per_rank({text}), this "
                    "rank's part of it: restore it if it means something else",
                )
        elif place is not None:
            self._work.undecided(
                node,
                f"whether {text} in this shape is the loader's batch size: the tensors "
                f"here hold this rank's part of the batch, which is per_rank({text})",
            )
        elif self._decides_by_length(node):
            self._work.undecided(
                node,
                f"a condition compares `{text}`, the batch of all ranks, with a number "
                "computed from the length of this rank's part, which is "
                f"per_rank({text})",
            )
        elif (
            (elsewhere or (read and in_step))
            and self._meets_tensors(node)
            and not self._divides_a_loss(node)
            and not (self._counts_steps(node) or self._shown.only(node))
        ):
            self._work.undecided(
                node,
                f"a step reads `{text}`, which is the batch of all ranks, while the "
                "tensors here hold this rank's part, which is "
                f"per_rank({text})",
            )

    def _list_condition(self, node: cst.BaseExpression, seen: set[int]) -> None:
        """List a condition on a number that a length and the batch size give."""
        if self._names.of(node) is BatchShare.EITHER:
            seen |= {id(inner) for inner in found(node, cst.BaseExpression)}
            self._work.undecided(
                node,
                f"`{self._tree.text(node)}` has the length of this rank's part of the "
                "batch and the batch size of all ranks: use per_rank(...) of that "
                "batch size here",
            )

    def _list_unclear(
        self,
        node: cst.BaseExpression,
        seen: set[int],
        *,
        whole: bool,
        compared: bool = False,
    ) -> None:
        """List a number that may be the loader's batch size, or this rank's part."""
        if isinstance(node, cst.Tuple | cst.List) or self._tree.is_label(node):
            return
        unclear = self._names.of(node) is BatchShare.EITHER
        if not unclear and not (
            compared and self._names.may_be_whole_in_comparison(node)
        ):
            return
        if not whole:
            aside = self._counts_steps(node) or self._shown.only(node)
            if aside or self._sets_itself(node) or not self._meets_tensors(node):
                return
        seen |= {id(inner) for inner in found(node, cst.BaseExpression)}
        text = self._tree.text(node)
        why = self._names.why_unclear(node, named=self._has_its_name(node))
        what = "per_rank(...) for the batch size in it"
        if not self._names.is_part(node):
            what = f"per_rank({text})"
        self._work.undecided(
            node,
            f"whether `{text}` is the batch of all ranks here, or this rank's part "
            f"already ({why}): write {what} if it is that of all ranks",
        )

    def _sets_itself(self, node: cst.BaseExpression) -> bool:
        """Return whether a name is read to set the same name, as `n = n // 2` does."""
        for above in self._tree.ancestors(node):
            if any(dotted(t) == dotted(node) for t in targets_of(above)):
                return True
            if isinstance(above, cst.BaseSmallStatement):
                break
        return False

    def _meets_tensors(self, node: cst.BaseExpression, depth: int = 3) -> bool:
        """Return whether a number is an index or an argument, also under other names.

        A number that is only computed with is that of one process, as the numbers that
        are reduced over ranks.
        """
        here: cst.CSTNode = node
        above = self._tree.parent(node)
        while above is not None and not isinstance(above, cst.BaseSmallStatement):
            if isinstance(above, cst.SubscriptElement):
                return True
            if isinstance(above, cst.Call) and here is not above.func:
                full = self._tree.called(above)
                if self._flow.local(above):
                    return False  # which is looked through
                if full not in _COMPUTING and not full.startswith("math."):
                    return True
            here, above = above, self._tree.parent(above)
        if depth == 0 or not isinstance(above, cst.Assign | cst.AugAssign):
            return False
        scope = self._tree.function(node)
        where = self._tree.module if scope is None else scope.body
        names = {n.value for t in targets_of(above) for n in stored_names(t)}
        return any(
            self._meets_tensors(other, depth - 1)
            for other in found(where, cst.Name)
            if other.value in names and not self._tree.is_label(other)
        )

    def _divides_a_loss(self, node: cst.BaseExpression) -> bool:
        """Return whether a number is the divisor of a loss, which a proof looks at."""
        above = self._tree.parent(node)
        if not isinstance(above, cst.BinaryOperation) or above.right is not node:
            return False
        line = self._tree.parent(above)
        return (
            isinstance(above.operator, cst.Divide)
            and isinstance(line, cst.Assign)
            and any(dotted(t) in self._work.graph_names for t in targets_of(line))
        )

    def _counts_steps(self, node: cst.BaseExpression) -> bool:
        """Return whether the length of a data set is divided by the batch size."""
        parent = self._tree.parent(node)
        return (
            isinstance(parent, cst.BinaryOperation)
            and parent.right is node
            and isinstance(parent.operator, cst.Divide | cst.FloorDivide | cst.Modulo)
            and isinstance(parent.left, cst.Call)
            and self._tree.called(parent.left) == "len"
            and bool(parent.left.args)
            and self._tree.text(parent.left.args[0].value) in self._data
        )

    @cached_property
    def _data(self) -> set[str]:
        """The data sets of loaders, as the script writes them."""
        given = (
            argument(call, 0, "dataset")
            for call in self._tree.calls
            if self._work.job.batches.is_loader(call)
        )
        return {self._tree.text(data) for data in given if data is not None}

    def _is_named(self, node: cst.BaseExpression) -> bool:
        """Return whether a name or an entry of a dict is the loader's batch size."""
        return self._is_read(node) and self._names.of(node) is BatchShare.ALL_RANKS

    def _has_its_name(self, node: cst.BaseExpression) -> bool:
        """Return whether something is called as the loader's batch size is."""
        return self._is_read(node) and self._tree.text(node) in self._texts

    def _is_read(self, node: cst.BaseExpression) -> bool:
        """Return whether a variable, or an entry of one, is read here."""
        if not isinstance(node, _NAMES) or self._tree.is_label(node):
            return False
        return not self._is_set(node)

    def _is_set(self, node: cst.BaseExpression) -> bool:
        """Return whether a statement sets a name here, instead of reading it."""
        above: cst.CSTNode | None = self._tree.parent(node)
        inner: cst.CSTNode = node
        while isinstance(above, cst.Tuple | cst.List | cst.Element | cst.AssignTarget):
            inner, above = above, self._tree.parent(above)
        if isinstance(above, cst.Assign):
            return any(inner is target for target in above.targets)
        return above is not None and (
            getattr(above, "target", None) is inner or isinstance(above, cst.AsName)
        )

    def _is_size(self, node: cst.BaseExpression) -> bool:
        """Return whether a computed number is the loader's batch size."""
        if isinstance(node, cst.Tuple | cst.List | cst.Integer):
            return False
        if self._tree.is_label(node):
            return False
        if self._names.of(node) is BatchShare.ALL_RANKS:
            return True
        if not isinstance(node, cst.Name | cst.Attribute):
            return False
        origins = self._flow.origins(node, self._tree.function(node))
        return bool(origins) and all(id(o.value) in self._sized for o in origins)

    def _is_read_size(self, node: cst.BaseExpression) -> bool:
        """Return whether a name may have a batch size that is read outside of steps."""
        if not self._sized or not isinstance(node, cst.Name | cst.Attribute):
            return False
        if self._tree.is_label(node):
            return False
        origins = self._flow.origins(node, self._tree.function(node))
        return any(
            id(o.value) in self._sized and o.value is not node and not o.place
            for o in origins
        )

    def _place(self, node: cst.BaseExpression) -> int | None:
        """Return the dimension of a shape that a number is, or ``None``."""
        parent = self._tree.parent(node)
        shape: cst.BaseExpression = node
        index: int | None = None
        if isinstance(parent, cst.Element):
            around = self._tree.parent(parent)
            if not isinstance(around, cst.Tuple | cst.List):
                return None
            index = [e is parent for e in around.elements].index(True)
            shape, parent = around, self._tree.parent(around)
        if not isinstance(parent, cst.Arg):
            return None
        call = self._tree.parent(parent)
        if not isinstance(call, cst.Call):
            return None
        if parent.keyword is not None and parent.keyword.value not in ("size", "shape"):
            return None
        full = self._tree.called(call)
        last = full.rpartition(".")[2]
        plain = [a for a in call.args if a.keyword is None]
        place = plain.index(parent) if parent in plain else 0
        if full in _MAKING:
            if full in ("torch.full", "torch.normal", "torch.randint"):
                return index  # the shape is a separate tuple
            return place if index is None else index
        if full.startswith("numpy.") and last in _NUMPY:
            if index is not None:
                return index
            if last in ("normal", "uniform", "randint"):
                size = argument(call, 2, "size")
                return 0 if size is shape else None
            return place
        if self._tree.method_called(call, *_SHAPING) is not None:
            return place if index is None else index
        in_range = full == "range" and (len(plain) == 1 or place == 1)
        return 0 if in_range else None

    def _of_a_length(self, node: cst.BaseExpression, *, sure: bool = False) -> bool:
        """Return whether a number is compared with the length of a tensor.

        Args:
            node: The number.
            sure: Whether a length of something that lines before the steps make, such
                as a list, is left out.
        """
        around = self._tree.parent(node)
        first = isinstance(around, cst.Element) and self._place_of(around) == 0
        side = self._tree.parent(around) if isinstance(around, cst.Element) else node
        if isinstance(side, cst.Tuple | cst.List | cst.Set):
            sides = self._compared(side)
            if first and any(self._names.is_shape(other) for other in sides):
                return True
            parent = self._tree.parent(side)
            contained = isinstance(parent, cst.ComparisonTarget) and isinstance(
                parent.operator, cst.In | cst.NotIn
            )
            others = sides if contained else []
        else:
            others = self._compared(node)
        return any(
            self._names.is_length(o) or (not sure and self._is_length(o))
            for o in others
            if o is not node and o is not side
        )

    def _place_of(self, element: cst.Element) -> int:
        around = self._tree.parent(element)
        elements = getattr(around, "elements", [])
        return [e is element for e in elements].index(True)

    def _compared(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return the sides of a comparison of which a number is one."""
        parent = self._tree.parent(node)
        if isinstance(parent, cst.ComparisonTarget):
            parent = self._tree.parent(parent)
        if not isinstance(parent, cst.Comparison):
            return []
        return [parent.left, *(c.comparator for c in parent.comparisons)]

    def _decides_by_length(self, node: cst.BaseExpression) -> bool:
        """Return whether a condition computes with a length and another number."""
        sides = self._compared(node)
        parent = self._tree.parent(node)
        if isinstance(parent, cst.If | cst.While | cst.IfExp | cst.BooleanOperation):
            sides = [node] if isinstance(node, cst.BinaryOperation) else []
        return any(self._names.has_length(side) for side in sides)

    def _is_length(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Call):
            if self._tree.called(node) == "len" and node.args:
                return not (
                    self._is_of_data(node.args[0].value)
                    or self._is_shape(node.args[0].value)
                )
            given = argument(node, 0, "dim")
            on = self._tree.method_called(node, "size")
            return on is not None and given is not None and self._is_zero(given)
        if isinstance(node, cst.Subscript):
            base, index = node.value, node.slice[0].slice
            return (
                isinstance(base, cst.Attribute)
                and base.attr.value == "shape"
                and isinstance(index, cst.Index)
                and self._is_zero(index.value)
            )
        return False

    def _is_shape(self, node: cst.BaseExpression) -> bool:
        """Return whether something is a shape, whose length is its dimensions."""
        if isinstance(node, cst.Call):
            return self._tree.method_called(node, "size") is not None and not node.args
        return isinstance(node, cst.Attribute) and node.attr.value == "shape"

    def _is_zero(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Integer) and node.value == "0"

    def _is_of_data(self, node: cst.BaseExpression) -> bool:
        """Return whether something is a loader or its data, not a batch."""
        text = (dotted(node) or "").lower()
        return "loader" in text or "dataset" in text


def steps(work: Work) -> Iterator[cst.CSTNode]:
    """Return what runs in steps: bodies of loops, and functions that they call."""
    yield from (loop.node.body for loop in work.job.training)
    yield from (function.body for function in called_in_steps(work))


def called_in_steps(work: Work) -> Iterator[cst.FunctionDef]:
    """Return the functions that a step runs, with the models' ``forward``."""
    waiting: list[cst.CSTNode] = [loop.node.body for loop in work.job.training]
    seen: set[int] = set()
    while waiting:
        for call in found(waiting.pop(), cst.Call):
            functions = list(work.flow.local(call))
            if dotted(call.func) is not None:
                functions += _forwards(work, call)
            for function in functions:
                if id(function) not in seen:
                    seen.add(id(function))
                    yield function
                    waiting.append(function.body)


def _forwards(work: Work, call: cst.Call) -> Iterator[cst.FunctionDef]:
    for origin in work.flow.origins(call.func, work.tree.function(call)):
        inner = origin.value
        while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
            inner = inner.func.value  # Net().to(device)
        if not isinstance(inner, cst.Call):
            continue
        kind = work.tree.classes.get(dotted(inner.func) or "")
        if kind is not None:
            yield from (
                f
                for f in found(kind.body, cst.FunctionDef)
                if f.name.value == "forward"
            )
