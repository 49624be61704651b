"""List loaders from which training takes batches in a way that is not followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._models import reaching_training
from stretto.convert._tree import Scope, dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._flow import Origin
    from stretto.convert._loaders import Loaders

_INTO = (cst.Element, cst.StarredElement, cst.DictElement, cst.Subscript)


def point_out(work: Work, loaders: Loaders) -> None:
    """List loaders that stay whole although training may take their batches.

    Each rank would take all of their samples. Such is a loader that is put into a
    container, or is given to a function of another file, beside one that is divided.
    """
    _Untaken(work, loaders).point_out()


@final
class _Untaken:
    def __init__(self, work: Work, loaders: Loaders) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._loaders = loaders
        self._batches = work.job.batches
        self._listed: set[int] = set()

    def point_out(self) -> None:
        for loop in self._work.job.training:
            for node, scope in self._sources(loop.node):
                for leaf, loader in self._batches.hidden(node, scope):
                    self._list(
                        leaf,
                        f"`{self._tree.text(leaf)[:50]}` takes batches of `"
                        f"{loader[:40]}` in a way that is not followed, so each rank "
                        "takes all of them: loop over the DataLoader itself",
                    )
        taken = self._taken()
        named = self._named(self._in_training())
        unknown = self._named(self._in_unknown_loops())
        for call in self._tree.calls:
            if not self._batches.is_loader(call) or self._loaders.is_divided_call(call):
                continue
            is_taken = any(self._tree.within(call, made) for made in taken)
            names = unknown if is_taken else named | unknown
            places = self._containers(call)
            known = [p for p in places if p.rpartition(".")[2] in names]
            if known:
                self._list(
                    call,
                    f"what takes the batches of this loader, which is in `{known[-1]}`,"
                    " is not followed: if training does, each rank may take all of its "
                    "samples. Give it a name of its own, and loop over that",
                )

    def _list(self, node: cst.CSTNode, text: str) -> None:
        if id(node) not in self._listed:
            self._listed.add(id(node))
            self._work.undecided(node, text)

    def _sources(
        self, loop: cst.For | cst.While
    ) -> Iterator[tuple[cst.BaseExpression, Scope]]:
        """Yield what a loop, and `next` in it, go through."""
        scope = self._tree.function(loop)
        if isinstance(loop, cst.For):
            yield loop.iter, scope
        for call in found(loop.body, cst.Call):
            if dotted(call.func) == "next" and call.args:
                yield call.args[0].value, scope

    def _taken(self) -> list[cst.CSTNode]:
        """Return the expressions that make loaders whose batches are taken somewhere.

        Of a function that returns loaders these are those that it makes, too.
        """
        origins: list[Origin] = []
        loops: Iterator[cst.For | cst.CompFor]
        loops = found(self._tree.module, (cst.For, cst.CompFor))
        for loop in loops:
            origins += self._batches.taken(loop.iter, self._tree.function(loop))
        for call in self._tree.calls:
            if dotted(call.func) in ("next", "iter", "list") and call.args:
                given = call.args[0].value
                origins += self._batches.taken(given, self._tree.function(call))
        out: list[cst.CSTNode] = []
        waiting: list[cst.CSTNode] = [o.value for o in origins]
        seen: set[int] = set()
        while waiting:
            made = waiting.pop()
            if id(made) in seen:
                continue
            seen.add(id(made))
            out.append(made)
            for call in found(made, cst.Call):
                waiting += [f.body for f in self._flow.local(call)]
        return out

    def _containers(self, call: cst.Call) -> Iterator[str]:
        """Yield what a loader may get into, beside a variable or a parameter."""
        inside = False
        for above in self._tree.ancestors(call):
            if isinstance(above, _INTO):
                inside = True
            elif isinstance(above, cst.Call) and not self._flow.local(above):
                inside = True
                for node in (above.func, *(a.value for a in above.args)):
                    on = node.value if isinstance(node, cst.Attribute) else node
                    if isinstance(on, cst.Name | cst.Attribute):
                        yield dotted(on) or ""
            elif isinstance(above, cst.Assign):
                for target in above.targets:
                    yield from self._into(target.target, inside=inside)
            elif isinstance(above, cst.AnnAssign):
                yield from self._into(above.target, inside=inside)
            elif isinstance(above, cst.AugAssign):
                yield from self._into(above.target, inside=True)
            elif isinstance(above, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                return

    def _into(self, target: cst.BaseExpression, *, inside: bool) -> Iterator[str]:
        if isinstance(target, cst.Subscript):
            yield dotted(target.value) or ""
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                yield from self._into(element.value, inside=True)
        elif inside or not isinstance(target, cst.Name):
            yield dotted(target) or ""

    def _in_training(self) -> list[cst.CSTNode]:
        """Return training loops, and what loops around them go through."""
        out: list[cst.CSTNode] = []
        for loop in self._work.job.training:
            out.append(loop.node)
            out += [
                around.iter
                for around in self._tree.loops(loop.node)
                if isinstance(around, cst.For)
            ]
        return out

    def _in_unknown_loops(self) -> list[cst.CSTNode]:
        """Return what loops go through that train, and are not known to take batches.

        Such as that of a step which other loops take with batches of a loader.
        """
        known = {id(loop.node) for loop in self._work.job.training}
        reaching = {id(f) for f in reaching_training(self._work)}
        out: list[cst.CSTNode] = []
        for call in self._tree.calls:
            if call not in self._work.job.backwards and not any(
                id(f) in reaching for f in self._flow.local(call)
            ):
                continue
            loops = self._tree.loops(call)
            if loops and not any(id(loop) in known for loop in loops):
                out += [node for node, _ in self._sources(loops[0])]
        return out

    def _named(self, waiting: list[cst.CSTNode]) -> set[str]:
        """Return the names in some code, and in what these names are made of."""
        out: set[str] = set()
        seen: set[int] = set()
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            for call in found(node, cst.Call):
                waiting += [f.body for f in self._flow.local(call)]
            for part in found(node, (cst.Name, cst.Attribute)):
                path = dotted(part)
                if path is None or self._tree.is_label(part):
                    continue
                out.add(path.rpartition(".")[2])
                scope = self._tree.function(part)
                waiting += [o.value for o in self._flow.assigned(path, scope)]
        return out
