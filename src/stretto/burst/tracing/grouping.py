"""Group operations into layers, and make each layer a module."""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, fx, nn

from stretto.burst.tracing.classify import Traced, is_heavy
from stretto.burst.tracing.names import free_name, new_graph
from stretto.burst.tracing.overlap import plain_tensors, regions_of
from stretto.burst.tracing.records import Context
from stretto.burst.tracing.sample_positions import depends_on_position, source_line_of
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Group = tuple[fx.Node, ...]


def groups_of(traced: Traced) -> list[Group]:
    """Return the operations of each layer."""
    joined = _Joined(traced)
    _regions(traced, joined)
    _share(traced, joined)
    _random(traced, joined)
    _contract(traced, joined)
    groups = joined.groups()
    readers = [
        g for g in groups if any(traced.source in _reads(traced, op) for op in g)
    ]
    if len(readers) > 1:
        # One layer must pass the input on: an operation that returns it unchanged.
        _add_stem(traced)
        return groups_of(traced)
    return groups


class _Joined:
    """Disjoint sets of operations, each identified by its first."""

    def __init__(self, traced: Traced) -> None:
        self._order = {op: i for i, op in enumerate(traced.ops)}
        self._of = {op: op for op in traced.ops}

    def of(self, op: fx.Node) -> fx.Node:
        while self._of[op] is not op:
            op = self._of[op]
        return op

    def join(self, ops: list[fx.Node]) -> None:
        roots = sorted({self.of(op) for op in ops}, key=lambda op: self._order[op])
        for root in roots[1:]:
            self._of[root] = roots[0]

    def groups(self) -> list[Group]:
        found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for op in self._order:
            found[self.of(op)].append(op)
        return [tuple(ops) for ops in found.values()]


def users_of(traced: Traced) -> dict[fx.Node, list[fx.Node]]:
    """Return for each operation those that read it."""
    users: dict[fx.Node, list[fx.Node]] = {op: [] for op in traced.ops}
    for op in traced.ops:
        for read in traced.before[op]:
            users[read].append(op)
    return users


def _regions(traced: Traced, joined: _Joined) -> None:
    """Join all operations between a tensor without a row per sample and its uses.

    All paths from such an operation to the output meet again at its immediate
    post-dominator; the first one with rows ends the layer. O(V E) in the worst case.
    """
    users = users_of(traced)
    order = {op: i for i, op in enumerate(traced.ops)}
    after = _after(traced, users)
    for op in traced.ops:
        if op in traced.rows:
            continue
        end = after[op]
        while end is not None and end not in traced.rows:
            end = after[end]
        if end is None:
            for later in _following(op, after):
                if later in traced.positions:
                    raise depends_on_position(later)
            raise SpecError(
                f"{source_line_of(op)}: {op.name!r} gives no tensor with a row for "
                "each sample, nor does what follows it: the first dimension must be "
                "the batch wherever layers meet"
            )
        joined.join(_between(op, end, users, order))


def _following(op: fx.Node | None, after: dict[fx.Node, Any]) -> Iterator[fx.Node]:
    """Yield an operation, and those where all paths from it meet."""
    while op is not None:
        yield op
        op = after[op]


def _after(traced: Traced, users: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, Any]:
    """Return where all paths from an operation to the output meet again."""
    order = {op: i for i, op in enumerate(traced.ops)}
    after: dict[fx.Node, fx.Node | None] = {}
    for op in reversed(traced.ops):
        meet: fx.Node | None = None
        for n, user in enumerate(users[op]):
            meet = user if n == 0 else _meet(meet, user, after, order)
        after[op] = meet
    return after


def _share(traced: Traced, joined: _Joined) -> None:
    """Join the operations that read one parameter, with all between them.

    A parameter belongs to one layer, because layers may run on different ranks. So does
    a buffer that a forward changes, such as the running mean of a batch norm, and
    whatever shares their memory. See Note [Memory that layers share].
    """
    held = {op: list(_tensors_of(traced, op)) for op in traced.ops}
    every = [tensor for tensors in held.values() for tensor in tensors]
    regions = regions_of(every)
    changed = {regions[id(x)] for x in every if isinstance(x, nn.Parameter)}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    for op, tensors in held.items():
        mine = {regions[id(tensor)] for tensor in tensors}
        for region in mine:
            readers[region].append(op)
        if any(_keeps_state(node) for node in (op, *_fixed_of(traced, op))):
            changed |= mine
    sets = [ops for key, ops in readers.items() if key in changed and len(ops) > 1]
    _join_each(traced, joined, sets)


def _keeps_state(node: fx.Node) -> bool:
    """Return whether an operation may change buffers of its module."""
    return bool(node.meta.get("norms") or node.meta.get("keeps_state"))


def _random(traced: Traced, joined: _Joined) -> None:
    """Join the operations that read the same random numbers."""
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for op in traced.ops:
        for node in _fixed_of(traced, op):
            if node.meta.get("draws") or node.meta.get("drops"):
                readers[node].append(op)
    _join_each(traced, joined, [ops for ops in readers.values() if len(ops) > 1])


def _fixed_of(traced: Traced, op: fx.Node) -> Iterator[fx.Node]:
    """Yield the fixed operations that an operation reads, directly or not."""
    work, seen = list(op.all_input_nodes), set()
    while work:
        node = work.pop()
        if node in seen or node in traced.before or node is traced.source:
            continue
        seen.add(node)
        yield node
        if node not in traced.counts:
            work += node.all_input_nodes


def _join_each(traced: Traced, joined: _Joined, sets: list[list[fx.Node]]) -> None:
    if not sets:
        return
    users = users_of(traced)
    order = {op: i for i, op in enumerate(traced.ops)}
    after = _after(traced, users)
    for ops in sets:
        end: fx.Node | None = ops[0]
        for op in ops[1:]:
            end = _meet(end, op, after, order)
        while end is not None and end not in traced.rows:
            end = after[end]
        if end is None:
            raise SpecError(
                f"{source_line_of(ops[0])} and {source_line_of(ops[-1])} share a "
                "parameter, its memory or running statistics, and what follows them "
                "does not meet in one tensor: they can't be one layer"
            )
        for op in ops:
            if op is not end:
                joined.join(_between(op, end, users, order))
        joined.join([*ops, end])


def _meet(
    one: fx.Node | None,
    two: fx.Node | None,
    after: Mapping[fx.Node, fx.Node | None],
    order: Mapping[fx.Node, int],
) -> fx.Node | None:
    while one is not two:
        if one is None or two is None:
            return None
        if order[one] < order[two]:
            one = after[one]
        else:
            two = after[two]
    return one


def _between(
    start: fx.Node,
    end: fx.Node,
    users: Mapping[fx.Node, list[fx.Node]],
    order: Mapping[fx.Node, int],
) -> list[fx.Node]:
    found, work = {start}, [start]
    while work:
        for user in users[work.pop()]:
            if user not in found and order[user] <= order[end]:
                found.add(user)
                if user is not end:
                    work.append(user)
    return list(found)


def _contract(traced: Traced, joined: _Joined) -> None:
    """Join operations of low cost with their only neighbor.

    The first possible join is made, until none is possible. A join changes what is
    possible for the group and for those that read only it, so these are checked again.
    """
    links = _Links(traced, joined)
    order = {op: i for i, op in enumerate(traced.ops)}
    left = [(order[first], first) for first in links.before]
    waiting = set(links.before)
    while left:
        _, group = heapq.heappop(left)
        waiting.discard(group)
        if joined.of(group) is not group or len(links.before[group]) != 1:
            continue
        (one,) = links.before[group]
        if len(links.after[one]) != 1 or links.are_apart(one, group):
            continue  # or the output goes elsewhere too
        # Operations of low cost belong to the layer before them, or else to the one
        # after; but a join stays where its branches end.
        follows = group not in links.heavy
        leads = one not in links.heavy and len(links.before[one]) < 2
        if not (follows or leads) or group in links.reads_input:
            continue
        joined.join([one, group])
        made = links.merge(one, group, joined.of(one))
        for again in (made, *links.after[made]):
            if again not in waiting:
                waiting.add(again)
                heapq.heappush(left, (order[again], again))


class _Links:
    """Inputs and properties of each group, identified by its first operation."""

    def __init__(self, traced: Traced, joined: _Joined) -> None:
        self.before: dict[fx.Node, set[fx.Node]] = {}
        self.after: dict[fx.Node, set[fx.Node]] = {}
        self.heavy: set[fx.Node] = set()
        self.reads_input: set[fx.Node] = set()
        self._draws: set[fx.Node] = set()
        self._whole: set[fx.Node] = set()
        for op in traced.ops:
            group = joined.of(op)
            self.before.setdefault(group, set())
            self.after.setdefault(group, set())
            if is_heavy(op, traced.root):
                self.heavy.add(group)
            if traced.source in op.all_input_nodes:
                self.reads_input.add(group)
            for node in (op, *_fixed_of(traced, op)):
                if node.meta.get("draws"):
                    self._draws.add(group)
                if _keeps_state(node):
                    self._whole.add(group)
        for op in traced.ops:
            for read in traced.before[op]:
                one, two = joined.of(read), joined.of(op)
                if one is not two:
                    self.before[two].add(one)
                    self.after[one].add(two)

    def are_apart(self, one: fx.Node, two: fx.Node) -> bool:
        """Return whether one draws random numbers and the other mixes samples."""
        return (one in self._draws and two in self._whole) or (
            two in self._draws and one in self._whole
        )

    def merge(self, one: fx.Node, two: fx.Node, made: fx.Node) -> fx.Node:
        """Record that a group was joined with the only one that reads it."""
        before, after = self.before.pop(one), self.after.pop(two)
        del self.before[two], self.after[one]
        self.before[made], self.after[made] = before, after
        for other in before:
            self.after[other] = {made if g is one else g for g in self.after[other]}
        for other in after:
            self.before[other] = {made if g is two else g for g in self.before[other]}
        for kind in (self.heavy, self.reads_input, self._draws, self._whole):
            if one in kind or two in kind:
                kind.add(made)
        return made


def _reads(traced: Traced, op: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operation reads and that come from the input."""
    before, source = traced.before, traced.source
    return [n for n in op.all_input_nodes if n in before or n is source]


@final
class _Stem(nn.Module):
    """Returns the input; of stretto, because a program may patch `nn.Identity`."""

    def forward(self, batch: Tensor) -> Tensor:
        """Return the input."""
        return batch


def _add_stem(traced: Traced) -> None:
    root, source = traced.root, traced.source
    name = free_name("stem_of_input", traced.module, root)
    root.add_submodule(name, _Stem())
    with root.graph.inserting_after(source):
        stem = root.graph.call_module(name, (source,))
    stem.meta["context"] = Context()
    source.replace_all_uses_with(
        stem,
        delete_user_cb=lambda user: user is not stem and user not in traced.counts,
    )
    traced.ops.insert(0, stem)
    traced.before[stem] = []
    for op in traced.ops[1:]:
        traced.before[op] = _reads(traced, op)
    traced.rows.add(stem)
    traced.shapes[stem] = traced.shapes[source]


def ordered(traced: Traced, groups: list[Group]) -> list[Group]:
    """Return the layers in an order in which they can run.

    Raises:
        SpecError: no such order exists: one layer would have to wait for itself.
    """
    number = {op: i for i, group in enumerate(groups) for op in group}
    order = {op: i for i, op in enumerate(traced.ops)}
    waits = [
        {number[r] for op in group for r in traced.before[op]} - {i}
        for i, group in enumerate(groups)
    ]
    left = sorted(range(len(groups)), key=lambda i: order[groups[i][-1]])
    done: list[int] = []
    while left:
        ready = next((i for i in left if waits[i] <= set(done)), None)
        if ready is None:
            op = groups[left[0]][0]
            raise SpecError(
                f"{source_line_of(op)}: the layer with {op.name!r} would have to wait "
                "for itself: join only layers that follow one another"
            )
        done.append(ready)
        left.remove(ready)
    return [groups[i] for i in done]


def names_of(
    traced: Traced,
    groups: list[Group],
    given: Mapping[Group, str],
    *,
    reserved: str,
) -> list[str]:
    """Return a name for each layer: of its first module that multiplies, or first."""
    taken, names = {reserved}, []
    for group in groups:
        modules = [op for op in group if op.op == "call_module"]
        heavy = [op for op in modules if is_heavy(op, traced.root)]
        first = (heavy or modules or group)[0]
        plain = str(first.target) if first.op == "call_module" else first.name
        name, count = given.get(group, plain), 1
        while name in taken:
            count += 1
            name = f"{plain}@{count}"
        taken.add(name)
        names.append(name)
    return names


def output_of(
    traced: Traced,
    group: Group,
    name: str,
    users: Mapping[fx.Node, Sequence[fx.Node]],
) -> fx.Node:
    """Return the only operation of a layer that others read.

    Args:
        traced: the model.
        group: the layer's operations.
        name: the layer's, for messages.
        users: from `users_of`.

    Raises:
        SpecError: there are several, or it has no row for each sample.
    """
    inside = set(group)
    given = [
        op
        for op in group
        if op is traced.ops[-1] or any(user not in inside for user in users[op])
    ]
    if len(given) != 1:
        raise SpecError(
            f"{source_line_of(group[0])}: layer {name!r} would give {len(given)} "
            "tensors: a layer gives one. Join only layers that follow one another"
        )
    if given[0] not in traced.rows:
        raise SpecError(
            f"{source_line_of(given[0])}: the first dimension of the output of layer "
            f"{name!r} must be the batch"
        )
    return given[0]


def positions_of(traced: Traced) -> dict[fx.Node, int]:
    """Return the place of each node in the recorded order."""
    return {node: i for i, node in enumerate(traced.root.graph.nodes)}


def module_of(
    traced: Traced, group: Group, result: fx.Node, positions: Mapping[fx.Node, int]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a layer as a module, and what it reads, in the order of arguments.

    Args:
        traced: the model.
        group: the layer's operations.
        result: the layer's output, from `output_of`.
        positions: from `positions_of`.

    Raises:
        SpecError: a hook reads a parameter of a module that is not in the layer.
    """
    module, reads = _Copy(traced, group, positions).module(result)
    held = {id(parameter) for parameter in module.parameters()}
    for node in (n for op in group for n in (op, *_fixed_of(traced, op))):
        for name in node.meta.get("borrowed", ()):
            if id(traced.module.get_parameter(name)) not in held:
                raise SpecError(
                    f"{source_line_of(node)}: a hook or function in {node.name!r} "
                    f"reads the parameter {name!r} of a module that forward does not "
                    "call: ranks would not send its gradient. Read it in forward"
                )
    return module, reads


class _Copy:
    """Copies a layer's operations, and the fixed ones that they need, to a graph."""

    def __init__(
        self, traced: Traced, group: Group, positions: Mapping[fx.Node, int]
    ) -> None:
        self._traced, self._group, self._positions = traced, group, positions
        self._graph = new_graph()
        self._copies: dict[fx.Node, Any] = {}
        self._inside = set(group)
        self._read: list[fx.Node] = []
        for op in group:
            for node in _reads(traced, op):
                if node not in self._inside and node not in self._read:
                    self._read.append(node)
        for node in self._read:
            self._copies[node] = self._graph.placeholder(f"from_{node.name}")
        self._first: fx.Node = self._copies[self._read[0]]
        self._context = Context()
        self._entered: list[fx.Node] = []

    def module(self, result: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
        for op in self._in_order():
            if op in self._inside:
                self._copies[op] = self._copy(op)
            else:
                self._of(op)
        self._into(Context())
        self._graph.output(self._copies[result])
        root = self._traced.root
        module = fx.GraphModule(root, self._graph)
        # Not by train(): submodules keep the mode that the user set.
        module.training = root.training
        return module, self._read

    def _in_order(self) -> list[fx.Node]:
        """Return all operations to copy in the order in which they were recorded.

        A fixed one may read a buffer that another operation then updates.
        """
        needed = {node for op in self._group for node in _fixed_of(self._traced, op)}
        return sorted(needed | self._inside, key=self._positions.__getitem__)

    def _copy(self, op: fx.Node) -> fx.Node:
        self._out_of_place(op)
        return self._emit(op)

    def _emit(self, node: fx.Node) -> fx.Node:
        """Copy an operation, within the modes that the model set around it."""
        for before in node.all_input_nodes:
            self._of(before)
        self._into(node.meta.get("context") or Context())
        return self._graph.node_copy(node, self._of)

    def _into(self, context: Context) -> None:
        """Leave the modes that are set and set others."""
        if context == self._context:
            return
        for entered in reversed(self._entered):
            self._graph.call_function(leave_mode, (entered,))
        self._entered = []
        for entry in context.autocast:
            self._entered.append(self._graph.call_function(enter_autocast, entry))
        if not context.grad:
            self._entered.append(self._graph.call_function(enter_no_grad))
        self._context = context

    def _out_of_place(self, op: fx.Node) -> None:
        """Copy a tensor that other operations may read before it is written to.

        A tensor computed in this layer, and not a part of another, is written itself.
        """
        position = op.meta.get("writes")
        if op.op == "call_module" and position is None:
            return
        if position is None:
            return
        target = op.args[position]
        assert isinstance(target, fx.Node)  # noqa: S101
        own = target in self._inside and not target.meta.get("aliases")
        if own and all(user is op for user in target.users):
            return
        kept = self._of(target)
        # With gradients: a write in no_grad leaves the tensor's own gradient as it is.
        self._into(replace(op.meta.get("context") or Context(), grad=True))
        self._copies[target] = self._graph.call_method("clone", (kept,))

    def _of(self, node: fx.Node | Any) -> Any:
        traced = self._traced
        if node in self._copies:
            return self._copies[node]
        if node in traced.counts:
            made: Any = self._count(traced.counts[node])
        else:
            self._out_of_place(node)
            made = self._emit(node)
        self._copies[node] = made
        return made

    def _count(self, each: int) -> fx.Node:
        rows = self._graph.call_method("size", (self._first, 0))
        return (
            rows if each == 1 else self._graph.call_function(operator.mul, (rows, each))
        )


def enter_no_grad() -> Any:
    """Begin a part without gradients and return a function that ends it."""
    mode = torch.no_grad()
    mode.__enter__()
    return mode


def enter_autocast(device: str, dtype: torch.dtype, enabled: Any, cache: Any) -> Any:
    """Begin an autocast region and return a function that ends it."""
    mode = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
    mode.__enter__()
    return mode


def leave_mode(mode: Any) -> None:
    """End a part that was begun."""
    mode.__exit__(None, None, None)


def _tensors_of(traced: Traced, op: fx.Node) -> Iterator[Tensor]:
    """Yield the model's tensors that an operation reads, also through fixed ones."""
    for held in _held_by(traced, op):
        if isinstance(held, nn.Module):
            yield from held.parameters()
            yield from held.buffers()
            yield from plain_tensors(held)
        elif isinstance(held, Tensor):
            yield held


def _held_by(traced: Traced, op: fx.Node) -> Iterator[Any]:
    """Yield the modules and tensors of the model that an operation uses."""
    for node in (op, *_fixed_of(traced, op)):
        if node.op in ("call_module", "get_attr"):
            yield attrgetter(str(node.target))(traced.root)
        for name in node.meta.get("borrowed", ()):
            yield traced.module.get_parameter(name)


def count_batch_norms(module: fx.GraphModule) -> int:
    """Return how many modules of a layer normalize over the batch."""
    return len({name for op in module.graph.nodes for name in op.meta.get("norms", ())})


def has_dropout(module: nn.Module) -> bool:
    """Return whether a layer drops at random."""
    kind = nn.modules.dropout._DropoutNd  # noqa: SLF001
    return any(
        isinstance(part, kind)
        or (isinstance(part, nn.MultiheadAttention) and part.dropout > 0)
        for part in module.modules()
    )
