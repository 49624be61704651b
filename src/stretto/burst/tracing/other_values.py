"""Run each operation of a layer with values that the layer itself would not give it.

# Note [Other values]
What an operation mixes may be zero for usual values: ``relu(h - 8).flip(0)`` adds
nothing of other samples until one exceeds 8. So may an index into the batch be each
sample's own position: ``where(h > 8, 0, arange(batch))``. Each operation is therefore
also run with random numbers in place of its floating-point inputs, and with random
truth values in place of its boolean ones, the same for each row. Integers are computed
from those. Floating-point values from which integers are computed stay as they are,
because an index may be in range for these only.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, fx

from stretto.burst.tracing.layer_runs import PlainInterpreter, fresh_buffers, graph_of
from stretto.burst.tracing.own_rows import without_checks
from stretto.burst.tracing.trial import ConstantDraws

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stretto.burst.tracing.layers import LayerNode
    from stretto.burst.tracing.trial import RandomInputs

Trace = dict[fx.Node, Any]
"""The result of each operation of a layer."""


_TIMES = 6
"""How often truth values are drawn: few of them are often equal in other orders."""


def other_values(
    node: LayerNode, full: Trace, numbers: RandomInputs
) -> Iterator[OtherValues]:
    """Yield random values for the results of a layer's operations.

    Args:
        node: the layer.
        full: its operations' results on all rows.
        numbers: draws the values.
    """
    for _ in range(_TIMES):
        found = OtherValues(node, full, numbers)
        yield found
        if not found.has_truths:
            return


@final
class OtherValues:
    """Random values for the results of a layer's operations, the same for each row.

    Args:
        node: the layer.
        full: its operations' results on all rows.
        numbers: draws the values.
    """

    def __init__(self, node: LayerNode, full: Trace, numbers: RandomInputs) -> None:
        self._node = node
        self._module: Any = node.module
        self._full = full
        keep = _before_integers(graph_of(node), full)
        self.has_truths = False
        self._tables: dict[fx.Node, tuple[int, Tensor]] = {}
        for op, value in full.items():
            side = _side_of(op, value)
            if side is None or (op in keep and value.dtype != torch.bool):
                continue
            if value.dtype == torch.bool:
                self.has_truths = True
                self._tables[op] = side, _random_booleans(value, side, numbers)
            elif value.is_floating_point() or value.is_complex():
                self._tables[op] = side, numbers.normal(value.shape, value)

    def traces(
        self,
        values: Mapping[str, Tensor],
        usual: Trace,
        rows: Sequence[int],
    ) -> Trace:
        """Return what each operation gives on some rows, where it runs.

        Args:
            values: outputs of all layers, on all rows.
            usual: the operations' usual results on these rows; used where one can't
                compute with other values.
            rows: their numbers.
        """
        inputs = [values[name][list(rows)] for name in self._node.inputs]
        tables = {
            op: table.index_select(side, torch.tensor(rows, device=table.device))
            for op, (side, table) in self._tables.items()
        }
        run = _Interpreter(self._module, usual, tables)
        with (
            contextlib.suppress(_Ended),
            torch.no_grad(),
            fresh_buffers(self._module),
            ConstantDraws(),
            without_checks(),
        ):
            run.run(*inputs)
        return run.found


class _Ended(Exception):
    """No later operation can run."""


@final
class _Interpreter(PlainInterpreter):
    def __init__(
        self, module: Any, usual: Trace, tables: dict[fx.Node, Tensor]
    ) -> None:
        super().__init__(module)
        self.found: Trace = {}
        self._usual = usual
        self._tables = tables

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        try:
            result = super().run_node(n)
        except Exception:  # noqa: BLE001 - such as a matrix that has no root
            return self._of_usual(n)
        kept = result.detach().clone() if isinstance(result, Tensor) else result
        self.found[n] = kept
        table = self._tables.get(n)
        # An operation that writes in place changes what others read.
        return result if table is None else table.clone()

    def _of_usual(self, n: fx.Node) -> Any:
        if n not in self._usual:
            raise _Ended
        value = self._usual[n]
        return value.clone() if isinstance(value, Tensor) else value


def _side_of(op: fx.Node, value: Any) -> int | None:
    """Return the dimension whose elements are the samples, if there is one."""
    if not isinstance(value, Tensor):
        return None
    if op.op == "placeholder":
        return 0
    side, each = op.meta.get("samples", (None, None))
    return side if each == 1 else None


def _random_booleans(like: Tensor, side: int, numbers: RandomInputs) -> Tensor:
    """Return random truth values: both in each row, or both among rows of one."""
    made = numbers.normal(like.shape, torch.empty(0)) > 0
    rows = made.movedim(side, 0)
    flat = rows.reshape(made.shape[side], -1).clone()
    if flat.shape[1] == 1:
        order = numbers.normal((len(flat),), torch.empty(0)).argsort()
        flat[order, 0] = torch.arange(len(flat)) % 2 == 0
    elif flat.shape[1]:
        flat[:, 0], flat[:, -1] = True, False
    return flat.reshape(rows.shape).movedim(0, side).to(like.device)


def _before_integers(graph: fx.Graph, full: Trace) -> set[fx.Node]:
    """Return the operations from whose results an integer is computed."""
    found: set[fx.Node] = set()
    for op in reversed(graph.nodes):
        value = full.get(op)
        is_integer = (
            isinstance(value, Tensor)
            and not value.is_floating_point()
            and not value.is_complex()
            and value.dtype != torch.bool
        )
        if is_integer or op in found:
            found.update(op.all_input_nodes)
    return found
