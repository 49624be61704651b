"""Insert the ranks, the functions that are called, and the end of the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert import _support
from stretto.convert._device import may_download
from stretto.convert._models import reaching_training
from stretto.convert._rank_sources import DRAWS
from stretto.convert._result import Target
from stretto.convert._tree import argument, dotted, found, is_main_guard

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_IMPORTS = {
    "os": "import os",
    "itertools": "import itertools",
    "contextlib": "import contextlib",
    "atexit": "import atexit",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "hvd": "import stretto.horovod.torch as hvd",
    "DataLoader": "from torch.utils.data import DataLoader",
    "RandomSampler": "from torch.utils.data import RandomSampler",
    "SequentialSampler": "from torch.utils.data import SequentialSampler",
    "DistributedSampler": "from torch.utils.data.distributed import DistributedSampler",
}

_SEEDING = {
    "torch": ("torch.manual_seed", "torch.random.manual_seed"),
    "random": ("random.seed",),
    "numpy": ("numpy.random.seed",),
}


def convert(work: Work, *, logs: cst.CSTNode | None, seeds_before: cst.CSTNode) -> None:
    """Join the ranks at the beginning, and end the group at the end.

    Args:
        work: The conversion.
        logs: The statement after which the log is shown, which only rank 0 does.
        seeds_before: What needs each rank's own random numbers.
    """
    _seed_ranks(work, before=seeds_before)
    entry = _Entry(work)
    head = _last_import(work, entry.first)
    beginning = ["join_ranks()"]
    seeds = _unseeded(work, head)
    if seeds:
        beginning.append("seed_equally()")
    leaving = "hvd.shutdown()" if work.horovod else "dist.destroy_process_group()"
    if entry.may_exit:
        beginning.append(f"atexit.register({leaving.removesuffix('()')})")
    texts = [work.named(t) for t in beginning]
    if logs is not None:
        work.after(logs, "if RANK > 0:\n    logging.disable(logging.WARNING)")
    if not entry.may_exit:
        entry.at_end(leaving)
    block = _block(work, seeds, head)
    if entry.flat:
        block += "\n\n" + "\n".join(texts) + "\n"
    else:
        entry.at_begin(beginning)
    nodes = cst.parse_module(block, config=work.tree.module.config_for_parsing)
    lines = [cst.EmptyLine(indent=False), *nodes.header]
    first = nodes.body[0].with_changes(leading_lines=lines)
    _insert(work, head, [first, *nodes.body[1:]])
    work.done(
        head,
        "after the imports: the ranks from the launcher's environment"
        + (", joined there" if entry.flat else ""),
    )
    if not entry.flat:
        work.done(entry.begin, "the ranks are joined here")


def is_joined(work: Work, node: cst.CSTNode) -> bool:
    """Return whether the ranks are joined before a node runs."""
    entry = _Entry(work)
    head = _last_import(work, entry.first)
    first = head if entry.flat and head is not None else entry.begin
    return _runs_after(work, node, first, flat=entry.flat, seen=set())


def _runs_after(
    work: Work, node: cst.CSTNode, first: cst.CSTNode, *, flat: bool, seen: set[int]
) -> bool:
    scope = work.tree.function(node)
    if scope is None:
        line, begun = work.tree.line(node), work.tree.line(first)
        return line > begun if flat else line >= begun
    if id(scope) in seen:
        return True
    seen.add(id(scope))
    return all(
        _runs_after(work, call, first, flat=flat, seen=seen)
        for call in work.flow.calls_of(scope)
    )


def _insert(work: Work, head: cst.CSTNode | None, nodes: list[cst.CSTNode]) -> None:
    if head is None:
        raise work.job.refuse(
            work.tree.module,
            "code runs before the first import, and what joins the ranks has to follow "
            "imports. Move an import to the top",
        )
    work.nodes_after(head, nodes)


def _seed_ranks(work: Work, *, before: cst.CSTNode) -> None:
    """Seed each rank differently from the first epoch on, for dropout and noise."""
    work.before(
        before, "if RANK > 0:\n    torch.manual_seed(torch.initial_seed() + RANK)"
    )
    work.done(
        before,
        "from here on each rank has its own random numbers, rank 0 those of the "
        "script; up to here all ranks have the same, so that models and splits are "
        "equal",
    )


def _unseeded(work: Work, head: cst.CSTNode | None) -> tuple[str, ...]:
    """Return the statements that seed what the script leaves unseeded."""
    bound = _bound_by(work, head)
    names = {"torch": "torch.manual_seed(int(seed))"}
    if bound.get("random") == "random":
        names["random"] = "random.seed(int(seed))"
    short = next((k for k, v in bound.items() if v == "numpy"), None)
    if short is not None:
        names["numpy"] = f"{short}.random.seed(int(seed))"
    unseeded = _unseeded_libraries(work)
    return tuple(text for library, text in names.items() if library in unseeded)


def _unseeded_libraries(work: Work) -> set[str]:
    """Return the libraries of whose random numbers the script sets no fixed seed."""
    return {
        library
        for library, calls in _SEEDING.items()
        if not any(
            work.tree.called(call) in calls and call.args and _is_fixed(work, call)
            for call in work.tree.calls
        )
    }


def _is_fixed(work: Work, call: cst.Call) -> bool:
    """Return whether a seed is certainly set, and to the same value on each rank."""
    tree = work.tree
    if any(
        isinstance(a, cst.If) and not is_main_guard(a) for a in tree.ancestors(call)
    ):
        return False
    seed = call.args[0].value
    if isinstance(seed, cst.Integer):
        return True
    if isinstance(seed, cst.Attribute):
        return True
    made = work.flow.origins(seed, tree.function(call))
    return bool(made) and all(
        isinstance(o.value, cst.Integer | cst.Attribute) for o in made
    )


def _last_import(work: Work, first: cst.CSTNode | None) -> cst.CSTNode | None:
    """Return the last import before the script defines or executes something.

    ``first`` is the statement that needs the ranks to be joined.
    """
    last: cst.CSTNode | None = None
    for line in work.tree.module.body:
        if line is first:
            break
        if isinstance(line, cst.SimpleStatementLine):
            if any(isinstance(part, cst.Import | cst.ImportFrom) for part in line.body):
                last = line
            elif _acts(work, line):
                break
        elif isinstance(line, cst.Try) and any(
            True for _ in found(line.body, (cst.Import, cst.ImportFrom))
        ):
            last = line
        elif last is None and isinstance(line, cst.FunctionDef) and not line.decorators:
            continue
        elif not isinstance(line, cst.If | cst.Try) or is_main_guard(line):
            break
    return last


def _first_to_build(work: Work) -> cst.CSTNode | None:
    """Return the first statement of the module that needs the ranks to be joined.

    Itself, or through functions and methods of the script, it creates a trained model,
    which is wrapped there, or a loader, or it trains, downloads, or draws random
    numbers that have to be equal on all ranks.
    """
    tree = work.tree
    waiting: list[cst.CSTNode] = [m.statement for m in work.job.models]
    waiting += [o.statement for loop in work.job.training for o in loop.origins]
    waiting += [loop.node for loop in work.job.training]
    waiting += work.job.backwards
    unseeded = _unseeded_libraries(work)
    waiting += [
        call
        for call in tree.calls
        if may_download(work, call) or _library_of_draw(work, call) in unseeded
    ]
    seen: set[cst.FunctionDef] = set()
    lines: list[cst.CSTNode] = []
    while waiting:
        node = waiting.pop()
        function = tree.function(node)
        if function is None:
            line = _line_of_module(work, node)
            if not isinstance(line, cst.ClassDef | cst.FunctionDef):
                lines.append(line)
        elif function not in seen:
            seen.add(function)
            waiting += work.flow.calls_of(function)
    return min(lines, key=tree.line, default=None)


def _library_of_draw(work: Work, call: cst.Call) -> str | None:
    """Return the library whose random numbers a call draws, as in a data set."""
    full = work.tree.called(call)
    if argument(call, -1, "generator") is not None:
        return None
    if full in DRAWS:
        return "torch"
    if full.startswith("numpy.random.") and full.rpartition(".")[2][:1].islower():
        return "numpy"
    return "random" if full.startswith("random.") else None


def _line_of_module(work: Work, node: cst.CSTNode) -> cst.CSTNode:
    """Return the statement of the module that contains a node."""
    above = [node, *work.tree.ancestors(node)]
    return above[-2] if isinstance(above[-1], cst.Module) else above[-1]


def _bound_by(work: Work, head: cst.CSTNode | None) -> dict[str, str]:
    """Return what the module's imports up to `head` bind, for sure.

    The block that is inserted after `head` runs before any later import, so it
    cannot use names that are imported below it or inside a function.
    """
    names: set[str] = set()
    for line in work.tree.module.body:
        if isinstance(line, cst.SimpleStatementLine):
            for part in line.body:
                if not isinstance(part, cst.Import | cst.ImportFrom):
                    continue
                if isinstance(part.names, cst.ImportStar):
                    continue
                for alias in part.names:
                    shown = dotted(alias.asname.name if alias.asname else alias.name)
                    names.add((shown or "").partition(".")[0])
        if line is head:
            break
    return {k: v for k, v in work.tree.imported.items() if k in names}


def _acts(work: Work, line: cst.SimpleStatementLine) -> bool:
    """Return whether a line does more than set a constant or silence a warning."""
    tree = work.tree
    return any(
        (tree.called(call)).startswith("torch.")
        or "DataLoader" in tree.called(call)
        or tree.called(call).rpartition(".")[2] in tree.classes
        for call in found(line, cst.Call)
    )


def _block(work: Work, seeds: tuple[str, ...], head: cst.CSTNode | None) -> str:
    """Return the imports, the ranks and the functions, as text."""
    target = work.choices.target
    names = set(_support.order()) & work.used | {"join_ranks"}
    if seeds:
        names.add("seed_equally")
    waiting, wanted = list(names), set(work.used)
    while waiting:
        for more in _support.NEEDS.get(waiting.pop(), ()):
            if more in _support.order() and more not in names:
                names.add(more)
                waiting.append(more)
            wanted.add(more)
    if "divided" in names and not work.choices.per_rank_batch:
        names.add("per_rank")
    if work.horovod:
        wanted |= {"hvd"}
        wanted -= {"dist", "DistributedDataParallel"}
    functions = [
        _support.text_of(
            name,
            horovod=work.horovod,
            per_rank_batch=work.choices.per_rank_batch,
            seeds=seeds,
        ).strip("\n")
        for name in _support.order()
        if name in names
    ]
    imports = _imports(work, wanted | {"os", "torch"}, head)
    ranks = _support.RANKS.strip("\n")
    mark = f"{_support.MARK} --to {target.value}"
    parts = [f"{mark}\n" + "\n".join(imports), "\n" + ranks]
    text = "\n".join(parts) + "\n\n\n" + "\n\n\n".join(functions) + "\n"
    return work.named(text)


def _imports(work: Work, wanted: set[str], head: cst.CSTNode | None) -> list[str]:
    have = _bound_by(work, head)
    lines = []
    for name, line in _IMPORTS.items():
        module, _, last = line.partition(" import ")
        full = (
            f"{module.removeprefix('from ')}.{last}"
            if line.startswith("from")
            else line.removeprefix("import ").partition(" as ")[0]
        )
        if name in wanted and have.get(name) != full:
            lines.append(line)
    if "DistributedDataParallel" in wanted:
        if work.choices.target is Target.STRETTO:
            lines.append("from stretto import DistributedDataParallel")
        else:
            lines.append("from torch.nn.parallel import DistributedDataParallel")
    return lines


class _Entry:
    """Return where the script begins to execute, and where it ends."""

    def __init__(self, work: Work) -> None:
        self._work = work
        tree = work.tree
        body = tree.module.body
        guard = next(
            (n for n in body if isinstance(n, cst.If) and is_main_guard(n)), None
        )
        at_top = [m.statement for m in work.job.models if m.scope is None]
        at_top += [
            o.statement
            for loop in work.job.training
            for o in loop.origins
            if o.scope is None
        ]
        at_top += [loop.node for loop in work.job.training if loop.scope is None]
        inside = guard is not None and all(tree.within(n, guard) for n in at_top)
        self.flat = bool(at_top) and not inside
        self._guard = guard if inside or (guard is not None and not at_top) else None
        self.begin: cst.CSTNode
        self.first = first = _first_to_build(work)
        if self._guard is not None:
            self.begin = self._guard.body.body[0]
            self._end: cst.CSTNode = self._guard.body.body[-1]
            if first is not None and tree.line(first) < tree.line(self._guard):
                self.begin = first
        elif self.flat:
            self.begin, self._end = body[0], body[-1]
        else:
            self.begin = first or self._main_call()
            self._end = body[-1]
        self.may_exit = any(
            tree.called(call) in ("sys.exit", "exit", "quit", "SystemExit")
            for call in found(self._end, cst.Call)
        )

    def _main_call(self) -> cst.CSTNode:
        """Return the top-level statement that calls the function that trains."""
        tree = self._work.tree
        names = {f.name.value for f in reaching_training(self._work)}
        for line in tree.module.body:
            if isinstance(line, cst.FunctionDef | cst.ClassDef):
                continue
            for call in found(line, cst.Call):
                if (dotted(call.func) or "").rpartition(".")[2] in names or any(
                    dotted(a.value) in names for a in call.args
                ):
                    return line
        first = self._work.job.training[0].node
        raise self._work.job.refuse(
            first,
            "nothing in this file starts the training that it contains. Give the file "
            "that is run, with the training loop in it, or call the training at the "
            "end of this file",
        )

    def at_begin(self, texts: list[str]) -> None:
        """Insert statements before the first."""
        self._work.before(self.begin, *texts)

    def at_end(self, text: str) -> None:
        """Insert a statement after the last."""
        self._work.after(self._end, text)
        self._work.done(self._end, "the process group ends after this")
