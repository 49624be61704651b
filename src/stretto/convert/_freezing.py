"""Find parameters that are frozen or trained again once their model is wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import argument, dotted, found

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.convert._edit import Work
    from stretto.convert._tree import Scope

_FLAG = "requires_grad"

_ITERATED = ("parameters", "named_parameters", "children", "modules", "named_modules")

_DEPTH = 4
"""Number of calls through which a setting is followed to where it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A place where parameters are frozen or trained again."""

    at: cst.CSTNode
    value: bool | None
    """``None`` is either."""
    owners: frozenset[int | None]
    """Identities of the objects that the parameters are of, or are part of."""
    before: bool
    """Whether it takes effect before any batch is trained on."""
    after: bool
    whole: bool
    """Whether all parameters of the object are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request of a statement or call to freeze parameters, or to train them again."""

    value: cst.BaseExpression | None
    known: bool | None
    """The value, if it is certain."""
    owner: cst.BaseExpression
    whole: bool


@final
class Freezing:
    """The settings of ``requires_grad`` in a script.

    Args:
        work: The conversion.
        beginnings: Returns the loops and calls of a scope that may train on a batch.
    """

    def __init__(
        self, work: Work, beginnings: Callable[[Scope], list[cst.CSTNode]]
    ) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._beginnings = beginnings
        self._settings = list(self._all())

    def refuse_unfreezing(self) -> None:
        """Refuse parameters that are frozen when DDP wraps them, and trained later.

        Raises:
            SpecError: there are some; the error has the line and the next step.
        """
        for later in self._settings:
            if not later.after or later.value is False:
                continue
            for first in self._settings:
                if (
                    first.before
                    and first.value is not True
                    and not first.owners.isdisjoint(later.owners)
                ):
                    raise self._work.job.refuse(
                        later.at,
                        "trains parameters that were frozen before (line "
                        f"{self._tree.shown_line(first.at)}), but "
                        "DistributedDataParallel exchanges gradients of those only "
                        "that are not frozen when the model is wrapped: each rank "
                        "would train these by itself. Instead of freezing them, leave "
                        "them out of the optimizer until then",
                    )

    def in_training(self, owners: set[int | None]) -> bool:
        """Return whether a part of a model may be frozen after training has begun."""
        return any(
            s.after
            and s.value is not True
            and not s.whole
            and not s.owners.isdisjoint(owners)
            for s in self._settings
        )

    def _all(self) -> Iterator[_Setting]:
        for line in found(self._tree.module, cst.Assign):
            for target in line.targets:
                part = target.target
                if isinstance(part, cst.Attribute) and part.attr.value == _FLAG:
                    yield from self._set(line, line.value, part.value)
        for call in self._tree.calls:
            on = self._tree.method_called(call, f"{_FLAG}_")
            if on is not None:
                yield from self._set(call, argument(call, 0, _FLAG), on)

    def _set(
        self,
        at: cst.CSTNode,
        value: cst.BaseExpression | None,
        of: cst.BaseExpression,
    ) -> Iterator[_Setting]:
        owner, chosen = of, False
        while (loop := self._loop_of(owner)) is not None:
            inner = next(
                (
                    on
                    for call in found(loop.iter, cst.Call)
                    if (on := self._tree.method_called(call, *_ITERATED)) is not None
                ),
                None,
            )
            chosen = chosen or any(
                isinstance(above, cst.If) and self._tree.within(above, loop)
                for above in self._tree.ancestors(at)
            )
            if inner is None:
                return
            owner = inner
        whole = not chosen and owner is not of
        known = self._literal(value) if value is not None else True
        asked = _Request(value=value, known=known, owner=owner, whole=whole)
        yield from self._asked(at, asked, _DEPTH)

    def _loop_of(self, node: cst.BaseExpression) -> cst.For | None:
        """Return the loop whose variable an expression is."""
        if not isinstance(node, cst.Name):
            return None
        for loop in self._tree.loops(node):
            if isinstance(loop, cst.For) and any(
                name.value == node.value for name in found(loop.target, cst.Name)
            ):
                return loop
        return None

    def _literal(self, value: cst.BaseExpression) -> bool | None:
        text = self._tree.text(value)
        return {"True": True, "False": False}.get(text)

    def _asked(
        self,
        at: cst.CSTNode,
        asked: _Request,
        depth: int,
    ) -> Iterator[_Setting]:
        """Yield where a setting takes effect: here, or where its function is called."""
        scope = self._tree.function(at)
        begins = self._beginnings(scope)
        after = any(self._follows(at, begin) for begin in begins) or any(
            self._tree.within(at, loop.node) for loop in self._work.job.training
        )
        if after or scope is None:
            path = dotted(asked.owner)
            parts = path is not None and path.count(".") > path.startswith("self.")
            yield _Setting(
                at=at,
                value=asked.known,
                owners=frozenset(self._roots(asked.owner)),
                before=not after,
                after=after,
                whole=asked.whole and not parts,
            )
        elif depth:
            for call in self._flow.calls_of(scope):
                inner = self._through(call, scope, asked)
                yield from self._asked(call, inner, depth - 1)

    def _follows(self, at: cst.CSTNode, begin: cst.CSTNode) -> bool:
        """Return whether a node may run after a batch was trained on at another."""
        if any(self._tree.within(begin, loop) for loop in self._tree.loops(at)):
            return True
        inside = self._tree.within(at, begin) or self._tree.within(begin, at)
        return not inside and self._tree.line(at) > self._tree.line(begin)

    def _through(
        self, call: cst.Call, scope: cst.FunctionDef, asked: _Request
    ) -> _Request:
        """Return what a function's request is for one of its calls."""
        names = parameters(scope)
        given = {
            name: passed
            for name in names
            for caller, passed in self._flow.passed(scope, name)
            if caller is call
        }
        value, known = asked.value, asked.known
        if isinstance(value, cst.Name) and value.value in names:
            value = given.get(value.value)
            known = self._literal(value) if value is not None else None
        path = dotted(asked.owner) or ""
        root = path.partition(".")[0]
        owner, whole = asked.owner, asked.whole
        if root == "self" and self._tree.owner(scope) is not None:
            on = self._tree.method_called(call, scope.name.value)
            owner, whole = call if on is None else on, False
        elif root in given:
            owner, whole = given[root], whole and path == root
        return _Request(value=value, known=known, owner=owner, whole=whole)

    def _roots(self, node: cst.BaseExpression) -> set[int | None]:
        """Return the identities of the object that an expression is a part of."""
        scope = self._tree.function(node)
        out: set[int | None] = set()
        while True:
            out |= {key[0] for key in self._flow.reached(node, scope)}
            if not isinstance(node, cst.Attribute | cst.Subscript):
                return out
            node = node.value
            if dotted(node) == "self":
                return out
