"""A module's operations with what each gives, and which of them make a layer.

A traced operation gives one of three: a *fixed* value, the same whatever the input (a
parameter, a mask, the number of positions); a *count* that follows the batch; or a
tensor computed from the input. Only the last are places where samples can move from
one set of ranks to another, and of these only those with a row for each sample.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BATCHES = (7, 11)
"""Two numbers of samples that no size of a model is likely to be a multiple of: what
differs between them in this ratio follows the batch."""

NORMS = (
    nn.modules.batchnorm._NormBase,  # noqa: SLF001
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
"""Modules with parameters that cost little and so follow what they normalise."""

_HEAVY = {
    functional.linear,
    functional.embedding,
    functional.scaled_dot_product_attention,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.matmul,
    torch.bmm,
    torch.einsum,
    operator.matmul,
    "matmul",
    "bmm",
}

_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Traced:
    """The operations of a module on one input tensor."""

    root: fx.GraphModule

    ops: list[fx.Node]
    """Those that give tensors computed from the input, in order; the last gives the
    model's output."""

    source: fx.Node
    """The input."""

    before: dict[fx.Node, list[fx.Node]]
    """For each of ``ops`` those of ``ops`` that it reads."""

    values: dict[fx.Node, Any]
    """What fixed operations that are no tensors give: numbers, sizes, types."""

    counts: dict[fx.Node, int]
    """For a count that follows the batch: its value for one sample."""

    rows: set[fx.Node]
    """Those of ``ops`` that give one tensor with a row for each sample."""

    shapes: dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]
    """Of the source and of those in ``rows``: shape of a sample, and type."""


def place_of(node: fx.Node) -> str:
    """Where in the user's code an operation stands, as ``file:line``."""
    for file, line in re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or ""):
        if not file.startswith(_TORCH):
            return f"{file}:{line}"
    return f"operation {node.name!r}"


def trace(
    module: nn.Module, example_inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Traced:
    """The operations of a module on an input like the example.

    Raises:
        SpecError: there is not one input tensor and one output tensor, or the module
            can't be traced; the line of its code that is in the way is named.
    """
    example, fixed = _bind(module, example_inputs, kwargs or {})
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    try:
        graph = tracer.trace(module, concrete_args=fixed)
    except Exception as error:
        raise SpecError(
            f"{_place_in(error, module)}: the layers of {type(module).__name__} can "
            f"not be told without running it ({str(error).splitlines()[0]}). What runs "
            "must not depend on values or sizes of tensors: rewrite this line with "
            "tensor operations, or move it into a module of torch.nn"
        ) from error
    _refuse_writes(graph)
    root = fx.GraphModule(module, graph)
    source = _clean(graph)
    _dropouts_as_modules(root)
    graph.eliminate_dead_code()
    return _classify(root, source, *_sizes(root, source, example))


def _bind(
    module: nn.Module, example_inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """The input tensor, and all other arguments by name."""
    bound = inspect.signature(module.forward).bind(*example_inputs, **kwargs)
    bound.apply_defaults()
    tensors = [name for name, v in bound.arguments.items() if isinstance(v, Tensor)]
    if len(tensors) != 1:
        raise SpecError(
            "a model must have one input tensor, with a row for each sample, got "
            f"{len(tensors)}: wrap the model in a module that joins them"
        )
    example = bound.arguments[tensors[0]]
    if example.dim() < 1:
        raise SpecError("the example input needs a row for each sample, got a scalar")
    fixed = {name: v for name, v in bound.arguments.items() if name != tensors[0]}
    varied = [name for name, v in fixed.items() if v in ((), {})]
    return example, {name: v for name, v in fixed.items() if name not in varied}


def _place_in(error: BaseException, module: nn.Module) -> str:
    """The last line that is not torch's own, of an error's trace."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_TORCH) and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}"
    return f"{inspect.getfile(type(module))}"


def _refuse_writes(graph: fx.Graph) -> None:
    """Refuses what writes into a tensor under a name that is read again."""
    for node in graph.nodes:
        method = node.op == "call_method" and re.search("[^_]_$", str(node.target))
        if node.target is operator.setitem or (method and not node.users):
            raise SpecError(
                f"{place_of(node)}: writes into a part of a tensor, or in place "
                "without using the result: which layers see it can't be told. Write "
                "it as an operation that gives a new tensor"
            )


def _clean(graph: fx.Graph) -> fx.Node:
    """The input; the other arguments and the checks of them are taken out."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    checks = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and (node.target is torch._assert or "_assert_is_none" in str(node.target))  # noqa: SLF001
    ]
    for node in reversed(checks):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    used = [node for node in inputs if node.users]
    for node in reversed(inputs):
        if not node.users and node in graph.nodes:
            graph.erase_node(node)
    if len(used) != 1:
        raise SpecError(
            f"a model must read one input tensor, this one reads {len(used)}"
        )
    source: fx.Node = used[0]
    return source


def _dropouts_as_modules(root: fx.GraphModule) -> None:
    """``functional.dropout`` as modules, so that they follow ``train`` and ``eval``."""
    kinds = {
        functional.dropout: nn.Dropout,
        functional.dropout1d: nn.Dropout1d,
        functional.dropout2d: nn.Dropout2d,
        functional.dropout3d: nn.Dropout3d,
        functional.alpha_dropout: nn.AlphaDropout,
    }
    for node in list(root.graph.nodes):
        kind = kinds.get(node.target) if node.op == "call_function" else None
        if kind is None:
            continue
        probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
        name = f"dropout_of_{node.name}"
        root.add_submodule(name, kind(probability))
        with root.graph.inserting_before(node):
            new = root.graph.call_module(name, (node.args[0],))
        new.stack_trace = node.stack_trace
        node.replace_all_uses_with(new)
        root.graph.erase_node(node)


def _sizes(
    root: fx.GraphModule, source: fx.Node, example: Tensor
) -> tuple[dict[fx.Node, Any], dict[fx.Node, Any]]:
    """What each operation gives for both numbers of samples, without computing it."""
    mode = FakeTensorMode()
    memo: dict[int, Any] = {}
    plain = [v for v in vars(root).values() if isinstance(v, Tensor)]
    for tensor in (*root.parameters(), *root.buffers(), *plain):
        memo[id(tensor)] = mode.from_tensor(tensor)
    fake = copy.deepcopy(root, memo)
    twins = dict(zip(fake.graph.nodes, root.graph.nodes, strict=True))
    found = []
    for batch in _BATCHES:
        runner = _Sizes(fake, twins)
        with mode, torch.no_grad(), given_momenta(fake):
            rows = torch.empty(
                (batch, *example.shape[1:]), dtype=example.dtype, device=example.device
            )
            runner.run(rows)
        found.append(runner.values)
    return found[0], found[1]


@contextmanager
def given_momenta(module: nn.Module) -> Iterator[None]:
    """Batch norms whose average is cumulative have a number for their momentum.

    They would compute it from how many batches there were, which no fake tensor knows.
    """
    norms = [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)  # noqa: SLF001
        and part.momentum is None
    ]
    try:
        for norm in norms:
            norm.momentum = 0.5
        yield
    finally:
        for norm in norms:
            norm.momentum = None


class _Sizes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, twins: dict[fx.Node, fx.Node]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.values: dict[fx.Node, Any] = {}
        self._twins = twins

    def run_node(self, n: fx.Node) -> Any:
        twin = self._twins[n]
        try:
            self.values[twin] = super().run_node(n)
        except Exception as error:
            raise SpecError(
                f"{place_of(twin)}: {twin.name!r} can't be sized without values of "
                f"tensors, or not for another batch ({str(error).splitlines()[0]}). "
                "Sizes must follow from the input's alone: rewrite this line"
            ) from error
        return self.values[twin]


def _follows(one: Any, two: Any) -> bool | None:
    """Whether a number follows the batch; ``None`` where it does so in no ratio."""
    if one == two:
        return False
    if isinstance(one, int) and one * _BATCHES[1] == two * _BATCHES[0]:
        return one % _BATCHES[0] == 0 or None
    return None


def _classify(
    root: fx.GraphModule,
    source: fx.Node,
    one: dict[fx.Node, Any],
    two: dict[fx.Node, Any],
) -> Traced:
    traced = Traced(root, [], source, {}, {}, {}, {source}, {})
    _row(traced, source, one[source], two[source])
    ops = {source}
    for node in root.graph.nodes:
        if node is source:
            continue
        if node.op == "output":
            result = node.args[0]
            if not isinstance(result, fx.Node) or result not in traced.rows - {source}:
                raise SpecError(
                    f"{type(root).__name__} must give one tensor with a row for each "
                    "sample, computed from its input; wrap it in a module that does"
                )
            break
        value, other = one[node], two[node]
        if not _holds_tensor(value):
            _plain(traced, node, value, other)
            continue
        read = [n for n in _all_inputs(node, traced) if n in ops]
        if read:
            ops.add(node)
            traced.ops.append(node)
            traced.before[node] = [n for n in read if n is not source]
            _row(traced, node, value, other)
    return traced


def _all_inputs(node: fx.Node, traced: Traced) -> list[fx.Node]:
    """The operands that are tensors; numbers are put in by value."""
    return [
        n
        for n in node.all_input_nodes
        if n not in traced.values and n not in traced.counts
    ]


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, Tensor)


def _plain(traced: Traced, node: fx.Node, value: Any, other: Any) -> None:
    """Notes a value that is no tensor."""
    if isinstance(value, torch.Size):
        traced.values[node] = tuple(
            Count(v // _BATCHES[0]) if _known(node, v, w) else v
            for v, w in zip(value, other, strict=True)
        )
    elif _known(node, value, other):
        traced.counts[node] = value // _BATCHES[0]
    else:
        traced.values[node] = value


@dataclass(frozen=True)
class Count:
    """A number that follows the batch."""

    each: int
    """For one sample."""


def _known(node: fx.Node, value: Any, other: Any) -> bool:
    follows = _follows(value, other)
    if follows is None:
        raise SpecError(
            f"{place_of(node)}: {node.name!r} follows the number of samples, but not "
            "as a multiple of it: a layer's work must not depend on how many samples "
            "run beside one"
        )
    return follows


def _row(traced: Traced, node: fx.Node, value: Any, other: Any) -> None:
    """Notes whether a tensor has a row for each sample."""
    if not isinstance(value, Tensor):
        return  # several tensors: what takes them apart belongs to the same layer
    sides = [_follows(v, w) for v, w in zip(value.shape, other.shape, strict=True)]
    if not any(side is not False for side in sides):
        raise SpecError(
            f"{place_of(node)}: {node.name!r} gives {tuple(value.shape)} whatever the "
            "number of samples: it mixes samples, which may be on different ranks. "
            "Leave reductions over the batch to the loss"
        )
    if value.shape[0] == _BATCHES[0] and sides == [True, *(False for _ in sides[1:])]:
        traced.rows.add(node)
        traced.shapes[node] = (tuple(value.shape[1:]), value.dtype)


def is_heavy(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether an operation starts a layer: it multiplies by parameters or matrices."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        own = next(module.parameters(), None) is not None
        return own and not isinstance(module, NORMS)
    return node.target in _HEAVY
