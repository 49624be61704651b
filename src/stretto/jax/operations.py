"""Collectives besides those of gradients, in and outside of `jax.jit`.

A call is bracketed by two ordered effects, so ranks run all such calls, and the rounds
of gradients, in the order of their programs.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stretto.errors import SpecError
from stretto.horovod.reduce_ops import ENGINE_OPS, Average, ReduceOp
from stretto.jax import callbacks, ranks
from stretto.jax.refusals import refuse_transformed
from stretto.runtime.exchange import ArrayRow, request_for, tensor_of
from stretto.runtime.negotiated import CollectiveKind, Op, Request

if TYPE_CHECKING:
    from collections.abc import Callable


_MOVED_AS = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
"""Types that the engine lacks, which it moves as others of their size."""


def _one_by_one(_number: float = 0.0) -> float:
    return 0.0


def _moved(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array's memory in a type that the engine has."""
    return array.view(_MOVED_AS.get(array.dtype.name, array.dtype))


def _run(
    what: str,
    tree: Any,
    shape_of: Callable[[tuple[int, ...]], tuple[int, ...]],
    send: Callable[[list[np.ndarray[Any, Any]], list[str]], list[np.ndarray[Any, Any]]],
    *,
    reduces: bool = False,
) -> Any:
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    refuse_transformed(what, [leaf for _, leaf in found])
    leaves = [jnp.asarray(leaf) for _, leaf in found]
    names = [f"{what} {jax.tree_util.keystr(path)}" for path, _ in found]
    if not leaves:
        return tree
    for name, leaf in zip(names, leaves, strict=True):
        dtype = leaf.dtype
        if not reduces and dtype.name in _MOVED_AS:
            dtype = np.dtype(_MOVED_AS[dtype.name])
        ArrayRow(name=name, shape=leaf.shape, dtype=dtype)

    def run(outputs: Any, _gate: Any, *arrays: Any) -> None:
        copies = [_moved(np.array(array, order="C")) for array in arrays]
        results = send(copies, names)
        for output, result in zip(outputs[:-1], results, strict=True):
            if output.shape != result.shape:
                raise SpecError(
                    f"{what} needs arrays of one shape on all ranks: the result has "
                    f"shape {list(result.shape)}, expected {list(output.shape)}"
                )
            output[...] = result.view(output.dtype)
        outputs[-1][...] = 0

    gate = callbacks.ordered(_one_by_one)
    shapes = [jax.ShapeDtypeStruct(shape_of(x.shape), x.dtype) for x in leaves]
    token = jax.ShapeDtypeStruct((), np.float32)
    *results, ended = callbacks.call(run, [*shapes, token], gate, *leaves)
    callbacks.ordered(_one_by_one, ended)
    return jax.tree_util.tree_unflatten(structure, results)


def _send(
    requests: list[Request], arrays: list[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    engine = ranks.joined().engine
    handles = [
        engine.submit(request, tensor_of(array), tensor_of(array))
        for request, array in zip(requests, arrays, strict=True)
    ]
    for handle in handles:
        handle.wait()
    return arrays


def allreduce(tree: Any, *, op: ReduceOp = Average) -> Any:
    """Return a tree of arrays reduced over ranks, for instance losses and metrics.

    All ranks must call it with equal paths, shapes and dtypes. An average of integers
    truncates toward zero.

    Raises:
        SpecError: `init` was not called, a dtype can't be sent, or the call is within
            vmap, pmap, shard_map or a differentiated function.
    """
    if op not in ENGINE_OPS:
        raise SpecError(
            f"op must be one of {', '.join(o.name for o in ENGINE_OPS)}, got {op!r}"
        )
    if ranks.size() == 1:
        return tree

    def send(arrays: Any, names: Any) -> Any:
        return _send(_requests(names, arrays, op=ENGINE_OPS[op]), arrays)

    return _run("allreduce", tree, lambda shape: shape, send, reduces=True)


def _requests(
    names: list[str],
    arrays: list[np.ndarray[Any, Any]],
    *,
    kind: CollectiveKind = CollectiveKind.ALLREDUCE,
    op: Op = Op.SUM,
) -> list[Request]:
    return [
        request_for(
            ArrayRow(name=name, shape=array.shape, dtype=array.dtype), kind=kind, op=op
        )
        for name, array in zip(names, arrays, strict=True)
    ]


def broadcast(tree: Any, root: int = 0) -> Any:
    """Return rank ``root``'s tree on all ranks, for instance initial parameters.

    All ranks must call it with equal paths, shapes and dtypes. Send a new-style random
    key as ``jax.random.key_data`` of it.

    Raises:
        SpecError: ``root`` isn't a rank, or as `allreduce`.
    """
    if not 0 <= root < ranks.size():
        raise SpecError(f"root must be from 0 to {ranks.size() - 1}, got {root}")
    if ranks.size() == 1:
        return tree

    def send(arrays: Any, names: Any) -> Any:
        requests = [
            dataclasses.replace(request, root=root)
            for request in _requests(names, arrays, kind=CollectiveKind.BROADCAST)
        ]
        return _send(requests, arrays)

    return _run("broadcast", tree, lambda shape: shape, send)


def allgather(tree: Any) -> Any:
    """Return the ranks' arrays, joined along their first dimension in rank order.

    All ranks must call it with equal paths, shapes and dtypes; a scalar counts as an
    array of one element.

    Raises:
        SpecError: as `allreduce`.
    """
    count = ranks.size()
    tree = jax.tree_util.tree_map(jnp.atleast_1d, tree)
    if count == 1:
        return tree

    def send(arrays: Any, names: Any) -> Any:
        engine = ranks.joined().engine
        requests = [
            dataclasses.replace(request, shape=request.shape[1:], rows=len(array))
            for request, array in zip(
                _requests(names, arrays, kind=CollectiveKind.ALLGATHER),
                arrays,
                strict=True,
            )
        ]
        handles = [
            engine.submit(request, tensor_of(array))
            for request, array in zip(requests, arrays, strict=True)
        ]
        results = []
        for handle, array in zip(handles, arrays, strict=True):
            gathered = handle.wait()
            if gathered is None:
                raise AssertionError("an all-gather ended without a result")
            results.append(
                np.empty((sum(handle.received_splits), *array.shape[1:]), array.dtype)
            )
            tensor_of(results[-1]).copy_(gathered)
        return results

    return _run("allgather", tree, lambda shape: (count * shape[0], *shape[1:]), send)


def barrier() -> None:
    """Wait until all ranks have called it and ended the computations before it."""
    joined = ranks.joined()
    jax.effects_barrier()
    if joined.engine.size > 1:
        joined.engine.barrier("barrier of stretto.jax").wait()


def broadcast_object(obj: Any, root: int = 0) -> Any:
    """Return rank ``root``'s object on all ranks; call it outside of `jit`.

    The object is pickled; the other ranks' ``obj`` is ignored.

    Raises:
        SpecError: ``root`` isn't a rank.
    """
    joined = ranks.joined()
    engine = joined.engine
    if not 0 <= root < engine.size:
        raise SpecError(f"root must be from 0 to {engine.size - 1}, got {root}")
    if engine.size == 1:
        return obj
    joined.objects += 1
    name = f"object {joined.objects}"
    own = engine.rank == root
    data = np.frombuffer(bytearray(pickle.dumps(obj) if own else b""), np.uint8)
    for part in ("size", "bytes"):
        array = np.array([data.size], np.int64) if part == "size" else data
        row = ArrayRow(name=f"{name} {part}", shape=array.shape, dtype=array.dtype)
        request = Request(
            name=row.name,
            kind=CollectiveKind.BROADCAST,
            dtype=row.dtype.name,
            shape=row.shape,
            root=root,
        )
        _send([request], [array])
        if part == "size" and not own:
            data = np.zeros(int(array[0]), np.uint8)
    return obj if own else pickle.loads(data.tobytes())
