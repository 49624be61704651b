"""Calls of a library's functions, and of what they made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._flow import WRAPPING
from stretto.convert._proof.arithmetic import elementwise
from stretto.convert._proof.batch_values import (
    Constant,
    Count,
    Func,
    Iter,
    LibraryResult,
    Linear,
    ObjectRef,
    Rows,
    Seq,
    Shape,
    Unproved,
    Why,
    first_bad,
    first_rows,
    has_count,
    is_of_batch,
    with_elements,
)
from stretto.convert._proof.builtin_calls import builtin_call
from stretto.convert._proof.containers import new_dict, new_list
from stretto.convert._proof.counts import followed
from stretto.convert._proof.draws import numpy_drawn
from stretto.convert._proof.known_names import BUILTINS, GENERATORS, SAME
from stretto.convert._proof.library_modules import module_call
from stretto.convert._proof.tensor_functions import tensor_function

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments
    from stretto.convert._proof.script_run import Frame, Run


_COMBINING = frozenset(
    [
        *("combinations", "permutations", "product", "pairwise", "accumulate"),
        *("combinations_with_replacement", "groupby", "batched"),
    ]
)
"""Functions of itertools that combine elements with each other."""


def made_call(
    run: Run, made: LibraryResult, given: CallArguments, frame: Frame
) -> Value:
    """Return the value of a call of an object that a library made."""
    if made.name == "functools.partial" and made.args:
        options = {**dict(made.options), **given.options}
        args = (*made.args[1:], *given.args)
        return run.call(made.args[0], args, options, given.node, frame)
    if made.name.endswith("nn.Sequential") and _is_chain(made):
        value: Value = given.args[0] if given.args else Constant()
        for part in made.args:
            value = run.call(part, (value,), {}, given.node, frame)
        return value
    whole = {
        name: run.items_of_ref(v) if isinstance(v, ObjectRef) else v
        for name, v in given.options.items()
    }
    args = tuple(
        run.items_of_ref(v) if isinstance(v, ObjectRef) else v for v in given.args
    )
    given = replace(given, args=args, options=whole)
    if made.name.startswith("torch.") and not made.name.startswith("torch.nn."):
        known = tensor_function(made.name, given)
        if known is not None:
            return known
    return module_call(made, given, trusted=run.trusted)


def _is_chain(made: LibraryResult) -> bool:
    """Return whether all layers of a sequential module are known."""
    return bool(made.args) and all(
        isinstance(a, LibraryResult | Func)
        or (isinstance(a, ObjectRef) and isinstance(a.kind, cst.ClassDef))
        for a in made.args
    )


def library_call(run: Run, full: str, given: CallArguments, frame: Frame) -> Value:
    """Return the value of a call of a library's function."""
    out = followed(full, given, _library_call(run, full, given, frame))
    if full.endswith("_") and given.args:
        run.write(given.args[0], out, given.node)
    return out


def _library_call(run: Run, full: str, given: CallArguments, frame: Frame) -> Value:
    node = given.node
    last_given = given.args[-1] if given.args else None
    if "*" in given.options and isinstance(last_given, Iter) and full != "zip":
        item = last_given.item
        rest = {k: v for k, v in given.options.items() if k != "*"}
        given = replace(given, args=(*given.args[:-1], item, item), options=rest)
    if full in BUILTINS:
        return builtin_call(run, full, given, frame)
    if full in WRAPPERS or full.rpartition(".")[2] in (
        "tqdm",
        "track",
        "alive_it",
        "trange",
    ):
        return given.args[0] if given.args else Iter(Constant())
    if full in WRAPPING or full in SAME:
        return given.args[0] if given.args else Constant()
    last = full.rpartition(".")[2]
    if full.startswith("torch.") and last in ("ModuleList", "ParameterList"):
        listed = given.args[0] if given.args else Seq(())
        items = run.items_of_ref(listed) if isinstance(listed, ObjectRef) else listed
        return new_list(
            run,
            items if isinstance(items, Seq | Iter) else Iter(Constant()),
            node,
            frame,
        )
    if full.startswith("torch.") and last == "ModuleDict":
        return (
            given.args[0]
            if given.args and isinstance(given.args[0], ObjectRef)
            else new_dict(run, {}, node, frame)
        )
    if last in ("Parameter", "UninitializedParameter"):
        return Constant(grad=True)
    if full.startswith("torch.utils.data.") and last == "random_split" and given.args:
        return Iter(given.args[0])
    if last == "deepcopy" or full == "copy.copy":
        return given.args[0] if given.args else Constant()
    if last == "data_parallel" and len(given.args) > 1:
        return run.call(given.args[0], given.args[1:2], {}, node, frame)
    if last in ("checkpoint", "maybe_checkpoint") and given.args:
        rest = {
            k: v
            for k, v in given.options.items()
            if k not in ("use_reentrant", "preserve_rng_state")
        }
        return run.call(given.args[0], given.args[1:], rest, node, frame)
    combines = full.startswith("itertools.") and last in _COMBINING
    if combines and any(is_of_batch(v) or has_count(v) for v in given.all):
        return Unproved(Why.ACROSS, node)
    if full in GENERATORS:
        return LibraryResult(full, node, given.args)
    if full.startswith(("random.", "numpy.random.")):
        rows = first_rows(given.all)
        return rows if rows is not None else numpy_drawn(given)
    if full in (
        "collections.defaultdict",
        "collections.OrderedDict",
        "collections.Counter",
    ):
        counts = full.endswith("Counter") and is_of_batch(Seq(given.args))
        parts = {"*": Unproved(Why.SELECTED, node)} if counts else {}
        return new_dict(run, parts, node, frame)
    if full in ("math.prod", "numpy.prod") and any(
        isinstance(v, Shape) for v in given.args
    ):
        return Count(exact=False)
    values = tuple(
        run.items_of_ref(v)
        if isinstance(v, ObjectRef) and isinstance(v.kind, str)
        else v
        for v in given.args
    )
    options = {
        k: run.items_of_ref(v)
        if isinstance(v, ObjectRef) and isinstance(v.kind, str)
        else v
        for k, v in given.options.items()
    }
    plain = replace(given, args=values, options=options)
    known = tensor_function(full, plain)
    if known is not None:
        return known
    of_torch = full.startswith(("torch.", "torchvision.")) and last[:1].isupper()
    if of_torch or not is_of_batch(Seq(tuple(plain.all))):
        kept = values if "Sequential" not in last else given.args
        return LibraryResult(full, node, kept, tuple(given.options.items()))
    if full.startswith("math."):
        return elementwise(values, node)
    if full.startswith("torch.") and not full.startswith("torch.nn.utils"):
        bad = first_bad(plain.all)
        if bad is None and any(
            isinstance(v, Linear | Rows) for v in with_elements(plain.all)
        ):
            return Unproved(Why.UNREAD, node)
    if full.startswith(("torchvision.", "timm.", "kornia.")):
        rows = first_rows(plain.all)
        if rows is not None:
            return replace(rows, raw=False, whole=False, kind="")
    return run.unread(node, plain.all)
