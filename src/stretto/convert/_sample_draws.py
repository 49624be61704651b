"""List random numbers for samples that are equal on all ranks.

`random` and NumPy give all ranks the same numbers, and ranks have different samples. So
data sets, transforms and samplers that draw from them pick the same for every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, argument, dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_PER_SAMPLE = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
"""Methods of data sets, samplers and transforms that run for samples."""

_NOT_DRAWING = ("seed", "getstate", "setstate", "get_state", "set_state")

_GENERATORS = (
    "random.Random",
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.Generator",
)


def point_out(work: Work) -> None:
    """List each draw for the samples of a training loader, once."""
    listed: set[int] = set()
    for workers in (False, True):
        draws = _SampleDraws(work, workers=workers)
        for function in draws.functions():
            if draws.is_seeded(function):
                continue
            for call in found(function.body, cst.Call):
                seeded = draws.is_of_a_generator(call)
                equal = seeded or (not workers and draws.is_global(call))
                if id(call) in listed or not equal:
                    continue
                listed.add(id(call))
                why = (
                    "as a generator with one seed does"
                    if seeded
                    else "as `random` and NumPy do without workers, num_workers=0"
                )
                work.undecided(
                    call,
                    f"`{work.tree.text(call)[:60]}` draws numbers for a rank's "
                    f"samples, and all ranks draw the same ones ({why}): draw them "
                    "with torch, or add the rank to the seed",
                )


@final
class _SampleDraws:
    """The functions that make the samples of training loaders, and their draws.

    Args:
        work: The script.
        workers: Whether to follow loaders that surely have workers, which torch seeds,
            with other seeds on other ranks.
    """

    def __init__(self, work: Work, *, workers: bool) -> None:
        self._workers = workers
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._found: dict[int, cst.FunctionDef | cst.Lambda] = {}
        self._walked: set[int] = set()

    def functions(self) -> list[cst.FunctionDef | cst.Lambda]:
        """Return the functions of the script that run for samples."""
        for loop in self._work.job.training:
            for origin in loop.origins:
                self._loader(origin.value, origin.scope)
            if isinstance(loop.node, cst.For):
                for call in found(loop.node.iter, cst.Call):
                    for function in self._flow.local(call):
                        self._add(function)
        return list(self._found.values())

    def _loader(self, made: cst.BaseExpression, scope: Scope) -> None:
        """Follow what a loader's call is given, also of a function that makes it."""
        if not isinstance(made, cst.Call) or id(made) in self._walked:
            return
        self._walked.add(id(made))
        if self._work.job.batches.is_loader(made):
            workers = argument(made, 5, "num_workers")
            sure = isinstance(workers, cst.Integer) and workers.value != "0"
            if sure and not self._workers:
                return
            for given in made.args:
                if given.keyword is None or given.keyword.value != "worker_init_fn":
                    self._value(given.value, scope)
            return
        for function in self._flow.local(made):
            for call in found(function.body, cst.Call):
                if self._work.job.batches.is_loader(call):
                    self._loader(call, function)

    def _value(self, node: cst.BaseExpression, scope: Scope) -> None:
        """Follow a value to the functions and classes that it is made with."""
        if id(node) in self._walked:
            return
        self._walked.add(id(node))
        for function in found(node, cst.Lambda):
            self._add(function)
        names: set[str] = set()
        for name in found(node, (cst.Name, cst.Attribute)):
            path = dotted(name)
            above = self._tree.parent(name)
            if path is None or path in names or isinstance(above, cst.Attribute):
                continue
            if self._tree.is_label(name):
                continue
            names.add(path)
            self._named(path)
            for origin in self._flow.origins(name, scope):
                if origin.value is not name:
                    self._value(origin.value, origin.scope)

    def _named(self, path: str) -> None:
        """Add a function of the script, or the methods of a class, by its name."""
        kind = self._tree.classes.get(path)
        if kind is not None:
            module = any("Module" in (dotted(b.value) or "") for b in kind.bases)
            wanted = (*_PER_SAMPLE, "forward") if module else _PER_SAMPLE
            for relative in self._tree.family(kind):
                for method in found(relative.body, cst.FunctionDef):
                    if method.name.value in wanted:
                        self._add(method)
        for function in self._tree.functions:
            if function.name.value == path and self._tree.owner(function) is None:
                self._add(function)

    def _add(self, function: cst.FunctionDef | cst.Lambda) -> None:
        if id(function) in self._found:
            return
        self._found[id(function)] = function
        scope = self._tree.function(function.body)
        for call in found(function.body, cst.Call):
            for other in self._flow.local(call):
                self._add(other)
            self._value(call.func, scope)  # self.transform(image)

    def is_global(self, call: cst.Call) -> bool:
        """Return whether a call draws from `random` or NumPy themselves."""
        path, full = dotted(call.func) or "", self._tree.called(call)
        return (
            path.partition(".")[0] in self._tree.imported
            and full.startswith(("random.", "numpy.random."))
            and full.rpartition(".")[2] not in _NOT_DRAWING
            and full not in _GENERATORS
        )

    def is_of_a_generator(self, call: cst.Call) -> bool:
        """Return whether a call draws from a generator with a seed of the script."""
        generator = argument(call, -1, "generator")
        if generator is not None and self._tree.called(call).startswith("torch."):
            return self._tree.text(generator) != "None"
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value in _NOT_DRAWING:
            return False
        return any(
            isinstance(o.value, cst.Call)
            and self._tree.called(o.value) in _GENERATORS
            and bool(o.value.args)
            and id(o.scope) not in self._found  # else each sample has its own
            for o in self._flow.origins(func.value, self._tree.function(call))
        )

    def is_seeded(self, function: cst.FunctionDef | cst.Lambda) -> bool:
        """Return whether a function seeds what it draws, as by a sample's index."""
        return any(
            self._tree.called(call) in ("random.seed", "numpy.random.seed")
            for call in found(function.body, cst.Call)
        )
