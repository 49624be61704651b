"""Let ranks read a file only after rank 0 has written it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._display import OPENERS, opens_for_writing
from stretto.convert._tree import arguments_of

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._tree import ScriptTree

_WRITTEN_SECOND = ("torch.save", "json.dump", "pickle.dump", "joblib.dump")
_WRITES_ITSELF = ("write_text", "write_bytes")

_READERS = (
    *OPENERS,
    "numpy.load",
    "numpy.loadtxt",
    "numpy.genfromtxt",
    "joblib.load",
    "PIL.Image.open",
    "cv2.imread",
    "imageio.imread",
    "matplotlib.pyplot.imread",
    "torchvision.io.read_image",
    "torchaudio.load",
    "safetensors.torch.load_file",
    "scipy.io.loadmat",
)
_READS_ITSELF = ("open", "read_text", "read_bytes")

_IN_WORKERS = ("__getitem__", "__getitems__", "__iter__", "__len__")
"""Methods of data sets, which a loader's processes call."""


def convert(work: Work) -> None:
    """Add barriers before reads of what this script has written before."""
    tree = work.tree
    written: dict[str, list[cst.Call]] = {}
    for call in tree.calls:
        if work.is_guarded(call) or call in work.written:
            for path in _written(tree, call):
                written.setdefault(path, []).append(call)
    waits: set[cst.CSTNode] = set()
    for call in tree.calls:
        path = _read(tree, call)
        writes = written.get(path, []) if path else []
        scope = tree.function(call)
        if not writes or work.is_guarded(call):
            continue
        if isinstance(scope, cst.FunctionDef) and scope.name.value in _IN_WORKERS:
            continue
        statement = tree.statement(call)
        if statement in waits or not any(_is_later(tree, call, w) for w in writes):
            continue
        waits.add(statement)
        work.before(statement, work.barrier)
        work.done(call, "every rank waits here until rank 0 has written this file")


def _is_later(tree: ScriptTree, read: cst.Call, write: cst.Call) -> bool:
    both = set(map(id, tree.loops(read))) & set(map(id, tree.loops(write)))
    return bool(both) or tree.line(read) > tree.line(write)


def _written(tree: ScriptTree, call: cst.Call) -> list[str]:
    """Return the paths that a call on rank 0 may write."""
    full = tree.called(call)
    paths = []
    if isinstance(call.func, cst.Attribute):
        owner = _path(tree, call.func.value)
        if call.func.attr.value in _WRITES_ITSELF:
            return [owner]
        if full not in _READERS and opens_for_writing(tree, call):
            paths.append(owner)
    positional, _ = arguments_of(call)
    place = 1 if full in _WRITTEN_SECOND else 0
    if place < len(positional):
        paths.append(_path(tree, positional[place]))
    return paths


def _read(tree: ScriptTree, call: cst.Call) -> str:
    """Return the path that a call reads; "" if it reads none."""
    if opens_for_writing(tree, call):
        return ""
    full = tree.called(call)
    positional, _ = arguments_of(call)
    if full in _READERS or full.startswith("pandas.read_"):
        return _path(tree, positional[0]) if positional else ""
    if isinstance(call.func, cst.Attribute) and call.func.attr.value in _READS_ITSELF:
        return _path(tree, call.func.value)
    return ""


def _path(tree: ScriptTree, node: cst.BaseExpression) -> str:
    """Return a path's text, without ``Path(...)`` around it."""
    while isinstance(node, cst.Call):
        positional, _ = arguments_of(node)
        is_path = tree.called(node) in ("pathlib.Path", "str", "os.fspath")
        if not is_path or len(positional) != 1:
            break
        node = positional[0]
    return tree.text(node)
