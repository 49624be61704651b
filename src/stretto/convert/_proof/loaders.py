"""The batches of a loader."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._collate import is_listed
from stretto.convert._proof.batch_values import (
    NONE,
    Constant,
    Func,
    Item,
    Iter,
    LibraryResult,
    ObjectRef,
    Rows,
    Seq,
    first_bad,
    is_of_batch,
)
from stretto.convert._proof.class_lookups import bound_method, method_of
from stretto.convert._proof.script_run import MODULE

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.fixed_tensors import Sizes
    from stretto.convert._proof.script_run import Run


def is_loader(run: Run, made: LibraryResult) -> bool:
    """Return whether an object of a library is a loader."""
    last = made.name.rpartition(".")[2]
    return last.endswith("DataLoader") or run.job.batches.is_loader(made.node)


def _tensors_of(run: Run, loader: LibraryResult) -> Value | None:
    """Return the batch of a loader whose samples are tensors of known shapes."""
    data = loader.option("dataset", 0)
    while isinstance(data, LibraryResult) and data.name.endswith("data.Subset"):
        data = data.option("dataset", 0)
    if isinstance(data, LibraryResult) and data.name.endswith("TensorDataset"):
        shapes = [v.shape if isinstance(v, Constant) else None for v in data.args]
        return _batch_of_shapes([None if s is None else s[1:] for s in shapes])
    if isinstance(data, ObjectRef) and isinstance(data.kind, cst.ClassDef):
        sample = _sample_of(run, data)
        if isinstance(sample, Seq):
            return _batch_of_shapes(
                [v.shape if isinstance(v, Constant) else None for v in sample.items]
            )
    return None


def _sample_of(run: Run, data: ObjectRef) -> Value | None:
    """Return a sample of a data set of the script."""
    kind = data.kind
    method = method_of(run, kind, "__getitem__") if not isinstance(kind, str) else None
    if method is None:
        return None
    before = run.state
    run.state = dict(before)
    get = bound_method(run, method, data)
    sample = run.call(get, (Constant(0),), {}, method[0], run.frames[MODULE])
    run.state = before
    return sample


def _batch_of_shapes(shapes: list[Sizes | None]) -> Value | None:
    """Return a batch of tensors, by the shapes of a sample's."""
    if not shapes or None in shapes:
        return None
    return Seq(
        tuple(
            Rows(raw=True, ndim=len(s) + 1, single=bool(s) and s[-1] == 1)
            for s in shapes
            if s is not None
        )
    )


def _with_lists(run: Run, value: Value) -> Value:
    """Return a value with the elements of lists in place of these."""
    if isinstance(value, ObjectRef) and value.kind == "list":
        value = run.items_of_ref(value)
    if isinstance(value, Seq):
        return Seq(tuple(_with_lists(run, v) for v in value.items))
    return value


def _function_of(run: Run, collate: Value) -> cst.FunctionDef | cst.Lambda | None:
    """Return the script's function that a loader's ``collate_fn`` calls."""
    if isinstance(collate, LibraryResult) and collate.name == "functools.partial":
        collate = collate.args[0] if collate.args else NONE
    if isinstance(collate, ObjectRef) and isinstance(collate.kind, cst.ClassDef):
        method = method_of(run, collate.kind, "__call__")
        return method[0] if method is not None else None
    return collate.node if isinstance(collate, Func) else None


def batch_of(run: Run, made: LibraryResult) -> Value:
    """Return the batch of a loader, as its ``collate_fn`` makes it."""
    raw = Rows(raw=True, whole=True)
    collate = made.option("collate_fn", 6)
    unknown = collate is not None and collate != NONE
    return read_batch(run, made) or (replace(raw, axis=None) if unknown else raw)


def read_batch(run: Run, made: LibraryResult) -> Value | None:
    """Return the batch of a loader if its ``collate_fn`` or its tensors are known."""
    collate = made.option("collate_fn", 6)
    if collate is None or collate == NONE:
        return _tensors_of(run, made)
    function = _function_of(run, collate)
    if function is None:
        return None
    if is_listed(run.work, function):
        return Rows(raw=True, whole=True)  # one note for one cause
    item = Iter(Item(), samples=True)
    out = run.call(collate, (item,), {}, made.node, run.frames[MODULE])
    out = _with_lists(run, out)
    known = is_of_batch(out) or isinstance(out, ObjectRef)
    if known and first_bad([out]) is None:
        return out
    return Rows(raw=True, whole=True, axis=None)
