"""Convert scripts that are distributed already: Horovod's and DDP's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import libcst as cst

from stretto.convert._result import Kind, Note, Target
from stretto.convert._tree import ScriptTree, dotted, found
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

_DDP = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
_OURS = ("stretto.DistributedDataParallel", "stretto.DDP")


def converted(
    tree: ScriptTree, target: Target, name: str
) -> tuple[str, list[Note]] | None:
    """Return the new text of a script that is distributed already, or ``None``.

    Raises:
        SpecError: it is distributed in an unsupported way.
    """
    modules = _modules(tree)
    horovod = [(m, n) for m, n in modules if m.split(".")[0] == "horovod"]
    if horovod:
        return _horovod(tree, horovod, target, name)
    ours = any(m.startswith("stretto.horovod") for m, _ in modules)
    uses = _uses(tree, (*_DDP, *_OURS))
    joins = [
        c
        for c in tree.calls
        if tree.called(c)
        in (
            "torch.distributed.init_process_group",
            "torch.distributed.init_device_mesh",
        )
    ]
    if ours or (uses and all(tree.full(u) in _OURS for u in uses)):
        return tree.module.code, [
            Note(line=0, kind=Kind.KNOW, text="uses stretto already: nothing to do")
        ]
    if uses:
        return _ddp(tree, target, name)
    if joins:
        raise SpecError(
            f"{name}:{tree.line(joins[0])}: joins a process group, so it is "
            "distributed already, but does not use DistributedDataParallel, which is "
            "what the conversion replaces. Nothing to convert: start it with torchrun"
        )
    return None


def _modules(tree: ScriptTree) -> list[tuple[str, cst.CSTNode]]:
    out: list[tuple[str, cst.CSTNode]] = []
    for plain in found(tree.module, cst.Import):
        out += [(dotted(a.name) or "", plain) for a in plain.names]
    for line in found(tree.module, cst.ImportFrom):
        if not line.relative:
            out.append((dotted(line.module) or "", line))
    return out


def _uses(tree: ScriptTree, names: tuple[str, ...]) -> list[cst.BaseExpression]:
    """Return outermost expressions, outside imports, that name given objects."""
    out: list[cst.BaseExpression] = []
    for node in found(tree.module, cst.BaseExpression):
        if (
            not isinstance(node, cst.Name | cst.Attribute)
            or tree.full(node) not in names
        ):
            continue
        parent = tree.parent(node)
        if isinstance(parent, cst.ImportAlias | cst.AsName):
            continue
        out.append(node)
    return out


class _Replace(cst.CSTTransformer):
    """Replace nodes by the results of functions."""

    def __init__(self, changes: dict[cst.CSTNode, Callable[[], cst.CSTNode]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if original_node in self._changes:
            return self._changes[original_node]()
        return super().on_leave(original_node, updated_node)


# Horovod

_PROVIDED = ("torch", "run", "tensorflow", "keras")

_NOT_PROVIDED = re.compile(
    r"(tensorflow(\.keras)?|keras)\.(elastic|data|xla_mpi_ops)\b"
)


def _horovod(
    tree: ScriptTree, imports: list[tuple[str, cst.CSTNode]], target: Target, name: str
) -> tuple[str, list[Note]]:
    if target is Target.DDP:
        raise SpecError(
            f"{name}:{tree.line(imports[0][1])}: a Horovod script moves to "
            "stretto.horovod, not to DDP: use --to horovod or --to stretto"
        )
    for module, line in imports:
        rest = ".".join(module.split(".")[1:])
        names = _from_package(line) or {""}
        wanted = {".".join(filter(None, (rest, imported))) for imported in names}
        for each in sorted(wanted - {""}):
            if each.split(".")[0] not in _PROVIDED or _NOT_PROVIDED.match(each):
                raise SpecError(
                    f"{name}:{tree.line(line)}: imports horovod.{each}, but stretto "
                    f"provides only {', '.join(f'horovod.{p}' for p in _PROVIDED)}, "
                    "the latter two without elastic and data. Replace this import "
                    "first"
                )
    changes: dict[cst.CSTNode, Callable[[], cst.CSTNode]] = {}
    notes = []
    bound = {
        (dotted(a.name) or "")
        for line in found(tree.module, cst.Import)
        for a in line.names
        if a.asname is None
    }
    for node in found(tree.module, cst.Name):
        parent = tree.parent(node)
        first_of_import = node.value == "horovod" and _begins_module(tree, node)
        named = (
            node.value == "horovod"
            and any(b.split(".")[0] == "horovod" for b in bound)
            and not (isinstance(parent, cst.Attribute) and parent.attr is node)
            and not isinstance(parent, cst.Arg | cst.AsName | cst.Param)
        ) or (isinstance(parent, cst.Arg) and parent.value is node)
        if node.value == "horovod" and (first_of_import or named):
            changes[node] = lambda: cst.parse_expression("stretto.horovod")
            if first_of_import:
                text = "horovod comes from stretto.horovod"
                notes.append(Note(line=tree.line(node), kind=Kind.DONE, text=text))
    return tree.module.visit(_Replace(changes)).code, sorted(notes)


def _from_package(line: cst.CSTNode) -> set[str]:
    """Return what ``from horovod import ...`` imports; nothing for a plain import."""
    if isinstance(line, cst.ImportFrom) and not isinstance(line.names, cst.ImportStar):
        return {dotted(a.name) or "" for a in line.names}
    return set()


def _begins_module(tree: ScriptTree, node: cst.Name) -> bool:
    """Return whether a name is the first part of an imported module's."""
    above: cst.CSTNode = node
    while isinstance(parent := tree.parent(above), cst.Attribute):
        if parent.attr is above:
            return False
        above = parent
    if isinstance(parent, cst.ImportFrom):
        return parent.module is above and not parent.relative
    return (
        isinstance(parent, cst.ImportAlias)
        and parent.name is above
        and isinstance(tree.parent(parent), cst.Import)
    )


# DDP


def _ddp(tree: ScriptTree, target: Target, name: str) -> tuple[str, list[Note]]:
    if target is Target.HOROVOD:
        raise SpecError(
            f"{name}: uses DistributedDataParallel already, and --to horovod does not "
            "rewrite it to Horovod's interface: use --to stretto"
        )
    if target is Target.DDP:
        text = "uses DistributedDataParallel already: nothing to do"
        return tree.module.code, [Note(line=0, kind=Kind.KNOW, text=text)]
    changes: dict[cst.CSTNode, Callable[[], cst.CSTNode]] = {}
    notes = []
    needs_import = False
    for line in found(tree.module, cst.ImportFrom):
        base = dotted(line.module)
        if base not in ("torch.nn.parallel", "torch.nn.parallel.distributed"):
            continue
        if isinstance(line.names, cst.ImportStar):
            raise SpecError(
                f"{name}:{tree.line(line)}: `from {base} import *` hides which names "
                "are used: name DistributedDataParallel in the import"
            )
        names = [dotted(a.name) for a in line.names]
        if "DistributedDataParallel" not in names:
            continue
        if len(names) > 1:
            raise SpecError(
                f"{name}:{tree.line(line)}: imports DistributedDataParallel together "
                "with other names: import it on its own line"
            )
        module = line.module
        if module is not None:
            changes[module] = lambda: cst.Name("stretto")
        text = "DistributedDataParallel comes from stretto"
        notes.append(Note(line=tree.line(line), kind=Kind.DONE, text=text))
    for use in _uses(tree, _DDP):
        if isinstance(use, cst.Attribute):
            needs_import = True
            changes[use] = lambda: cst.parse_expression(
                "stretto.DistributedDataParallel"
            )
            text = f"`{tree.text(use)}` became stretto.DistributedDataParallel"
            notes.append(Note(line=tree.line(use), kind=Kind.DONE, text=text))
    module_out = tree.module.visit(_Replace(changes))
    if needs_import and tree.imported.get("stretto") != "stretto":
        body = list(module_out.body)
        places = [
            i
            for i, s in enumerate(body)
            if isinstance(s, cst.SimpleStatementLine)
            and any(isinstance(p, cst.Import | cst.ImportFrom) for p in s.body)
        ]
        place = places[-1] + 1 if places else 0
        body.insert(place, cst.parse_statement("import stretto"))
        module_out = module_out.with_changes(body=body)
    return module_out.code, sorted(notes)
