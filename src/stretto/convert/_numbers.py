"""Replace numbers that are shown or used in decisions by those of all ranks.

Every rank must reach each collective. So a number is reduced where it is computed,
which also keeps decisions (a best loss, early stopping) equal on all ranks. A number
that a loop only adds up is reduced once after the loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._classify import Amount, Classifier
from stretto.convert._edit import theirs
from stretto.convert._loop_sums import (
    Added,
    LoopSums,
    added_in,
    base_of,
    is_zero,
)
from stretto.convert._losses import Loss
from stretto.convert._parentheses import as_one, grouped
from stretto.convert._passes import trains_in
from stretto.convert._result import Evaluation
from stretto.convert._shown import SHOWING, Shown
from stretto.convert._tree import Scope, dotted, found, parts, targets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._batch_loops import BatchLoop
    from stretto.convert._classify import AbstractShares
    from stretto.convert._edit import Work
    from stretto.convert._loaders import Loaders
    from stretto.convert._models import Models


@final
class Numbers:
    """The numbers of training and evaluation loops."""

    def __init__(
        self, work: Work, models: Models, loaders: Loaders, shares: AbstractShares
    ) -> None:
        self._work, self._loaders = work, loaders
        self._tree, self._shares, self._models = work.tree, shares, models
        self._classify = Classifier(work, shares)
        self._losses = self._classify.loss_names()
        self._graph = work.graph_names
        self._sums = LoopSums(work, models)
        self._shown_names = Shown(work.tree)
        self._handled: set[int] = set()
        self._texts: dict[str, str] = {}
        """The script's text of the names of elements."""
        self._left: set[int] = set()
        """Values that are listed and not reduced."""
        self._given: set[int] = set()
        """Loaders that give each rank its share, or all ranks what rank 0 has."""
        self.reduced_after: list[tuple[cst.CSTNode, list[str]]] = []
        """Loops, and the variables that are reduced after each."""
        self._summed: list[cst.BaseExpression] = []
        self._after: list[BatchLoop] = []
        """Loops over divided loaders, of which numbers may be read after them."""
        self._each_step: set[str] = set()
        """Sums to which loops add what is reduced in each step."""
        self._now: AbstractShares | None = None
        """Values of a rank's own samples, once sums of loops are reduced."""

    @property
    def graph(self) -> frozenset[str]:
        """Return the variables through which gradients flow."""
        return self._graph

    def is_reduced(self, node: cst.CSTNode) -> bool:
        """Return whether an expression was reduced over ranks."""
        return id(node) in self._handled

    def is_within_reduced(self, node: cst.CSTNode) -> bool:
        """Return whether an expression, or one around it, was reduced over ranks."""
        return any(id(n) in self._handled for n in (node, *self._tree.ancestors(node)))

    def convert(self) -> None:
        """Scale sum losses, reduce numbers, divide evaluations."""
        self._scale_sums()
        loops = [
            made
            for node in found(self._tree.module, cst.BaseCompoundStatement)
            if isinstance(node, cst.For | cst.While)
            and (made := self._work.job.batches.loop(node)) is not None
        ]
        for loop in loops:
            if loop.node in self._work.whole:
                self._handled |= {id(n) for n in found(loop.node, cst.BaseExpression)}
            elif loop.node in self._work.shared:
                self._evaluation(loop)
            elif self._loaders.is_divided(loop):
                self._divided(loop)
            elif self._tree.without_gradient(loop.node) and isinstance(
                loop.node, cst.For
            ):
                self._evaluation(loop)
            elif self._calls_model(loop):
                self._whole_on_all(loop)
        self._now = self._shares.reduced_by(self)
        for loop in self._after:
            self._at_source(loop.node.body, loop.scope, after=loop.node)
        self._comprehensions()
        for call in self._work.measured:
            for given in call.args:
                self._whole_to(call, given)
        for call in self._work.job.backwards:
            scope = self._tree.function(call)
            if scope is not None:
                self._at_source(scope.body, scope)
        for node in self._summed:
            self._check_once(node)

    def _check_once(self, node: cst.BaseExpression) -> None:
        """List a number that is summed over ranks and reads a loop's reduced sum."""
        scope, line = self._tree.function(node), self._tree.line(node)
        read = {name.value for name in found(node, cst.Name)}
        for loop, names in self.reduced_after:
            begins = self._tree.line(loop)
            for name in read.intersection(names):
                again = any(
                    begins < self._tree.line(o.statement) < line
                    and not self._tree.within(o.statement, loop)
                    for o in self._work.flow.assigned(name, scope)
                )
                if (
                    self._tree.function(loop) is scope
                    and begins < line
                    and not self._tree.within(node, loop)
                    and not again
                ):
                    self._work.undecided(
                        node,
                        f"`{self._tree.text(node)[:60]}` is summed over ranks, and "
                        f"`{name}` in it is reduced after its loop already, so all "
                        "ranks' samples may count once for each rank: reduce one of "
                        "the two",
                    )

    def _calls_model(self, loop: BatchLoop) -> bool:
        """Return whether a loop that no rank trains in calls a model."""
        calls = list(found(loop.node.body, cst.Call))
        return not any(call in self._work.job.backwards for call in calls) and any(
            call in self._work.job.batches.idle
            or self._models.is_model(call.func, self._tree.function(call))
            for call in calls
        )

    def _whole_on_all(self, loop: BatchLoop) -> None:
        """Let all ranks go through a loader in rank 0's order, with its random numbers.

        Ranks that compute different results would decide differently on them.
        """
        self._give_all_of(loop.node, [source for source, _ in loop.loaders])

    def _give_all_of(self, at: cst.CSTNode, sources: list[cst.BaseExpression]) -> None:
        above = self._tree.parent(at)
        if self._work.is_guarded(at) or (
            above is not None and self._models.loop_of_a_share(above) is not None
        ):
            return
        for source in sources:
            if id(source) not in self._given:
                self._given.add(id(source))
                self._work.call_around(source, "as_on_rank0")

    def _scale_sums(self) -> None:
        """Multiply losses that are sums, and list those that are not known to be one.

        Raises:
            SpecError: a sum is added to a term that is not a sum, so no factor is
            correct.
        """
        if self._work.choices.per_rank_batch:
            return
        ranks = self._work.expression("WORLD_SIZE")
        for call in self._work.job.backwards:
            loss = self._classify.losses.of(call)
            node = self._work.job.differentiated(call)
            if node is None:
                continue
            if loss is Loss.MIXED:
                raise self._work.job.refuse(
                    call,
                    "this loss adds a sum over samples to a mean or to a function of "
                    "the parameters, and gradients are averaged over ranks. Divide "
                    "the sum by the number of samples in the batch",
                )
            if loss is not Loss.SUM:
                continue
            self._work.change(node, partial(_times, factor=ranks))
            self._work.done(
                call,
                "the loss is a sum over samples, but gradients are averaged over "
                "ranks: multiplied by WORLD_SIZE, they equal those of the whole batch",
            )

    def _comprehensions(self) -> None:
        """List comprehensions over a divided loader, whose result differs by rank.

        Comprehensions over others, in which all ranks evaluate, are equal on all ranks.
        """
        for node in found(self._tree.module, cst.CompFor):
            if not self._loaders.divides(node):
                self._whole_comprehension(node)
            else:
                self._work.undecided(
                    node,
                    f"`{self._tree.text(node).strip()[:60]}` goes through each rank's "
                    "own batches, so its result differs by rank: write it as a `for` "
                    "loop that adds up numbers, which is converted, or reduce the "
                    "result over ranks",
                )

    def _whole_to(self, call: cst.Call, given: cst.Arg) -> None:
        """Let a function of another file go through a loader as on rank 0."""
        batches, scope = self._work.job.batches, self._tree.function(call)
        sources = batches.sources(given.value, scope)
        if not given.star and not self._loaders.has_divided(
            batches.taken(given.value, scope)
        ):
            self._give_all_of(call, [source for source, _ in sources])

    def _whole_comprehension(self, node: cst.CompFor) -> None:
        sources = self._work.job.batches.sources(node.iter, self._tree.function(node))
        around = self._tree.parent(node)
        if around is None or node in self._work.whole:
            return
        if self._tree.without_gradient(node) or any(
            self._models.is_model(model, self._tree.function(call))
            for call in found(around, cst.Call)
            for model in (call.func, *(a.value for a in call.args))
        ):
            self._give_all_of(node, [source for source, _ in sources])

    # Loops over this rank's share

    def _divided(self, loop: BatchLoop) -> None:
        body, scope = loop.node.body, loop.scope
        if loop.node not in self._work.passes and not all(
            self._loaders.has_divided([o]) for o in loop.origins
        ):
            self._work.undecided(
                loop.node,
                "this loop goes through a loader that is divided among ranks, and in "
                "another call through one that is not: sums over ranks count the "
                "other's samples once for each rank. Use one function for each",
            )
        if loop.node in self._work.passes:
            for size in self._work.divided:
                if self._tree.within(size, body):
                    self._work.undecided(
                        size,
                        f"`{self._tree.text(size)}` is this rank's part of the batch "
                        "here, also in passes that do not train, whose batches are "
                        "whole",
                    )
        after: dict[Amount, list[str]] = {Amount.MEAN: [], Amount.SUM: []}
        sums = [
            added
            for added in (*added_in(body), *self._sums.parts_added_in(loop))
            if self._sums.is_sum(added, scope)
        ]
        amounts = [self._amount(added, body) for added in sums]
        left = self._left_as_they_are(sums, amounts, body)
        for added, amount in zip(sums, amounts, strict=True):
            if added.name in self._graph and not (
                self._sums.is_number(added.value, loop.node)
                and self._sums.only_added(added, loop)
            ):
                continue  # gradients flow through it
            if base_of(added.name) in left:
                self._left.add(id(added.value))
                continue
            if amount is Amount.SAME:
                self._carry(added, loop)
                continue
            if self._is_handled(added.value):
                continue
            if amount is Amount.UNKNOWN:
                if not self._numbers_in(added.value):
                    continue
                self._work.undecided(
                    added.statement,
                    f"whether `{added.name}` adds up means or sums of each rank's "
                    "samples: its values are averaged over ranks",
                )
                amount = Amount.MEAN
            one_kind = self._is_one_kind(added.name, sums, amounts)
            if (
                one_kind
                and self._sums.only_added(added, loop)
                and (amount is Amount.MEAN or self._sums.begins_at_zero(added, loop))
            ):
                if added.name not in after[amount]:
                    after[amount].append(added.name)
                self._texts[added.name] = added.text
                self._handled.add(id(added.part))
            elif self._is_indexed_by_share(added):
                self._left.add(id(added.value))
            else:
                self._reduce(added.value, amount)
                self._each_step.add(base_of(added.name))
            self._carry(added, loop)
        for amount, names in after.items():
            self._reduce_after(loop, names, amount)
        self._at_source(body, scope)
        self._after.append(loop)

    def _amount(self, added: Added, body: cst.CSTNode) -> Amount:
        """Return how ranks' values of what a loop adds to a name combine."""
        amount = self._classify.of(added.value, body)
        counted = amount is Amount.SAME and self._is_indexed_by_share(added)
        return Amount.SUM if counted else amount

    def _is_indexed_by_share(self, added: Added) -> bool:
        """Return whether this rank's samples choose which element is added to."""
        return added.index is not None and any(
            self._shares.is_share(node)
            for part in added.index.slice
            for node in parts(part)
        )

    def _left_as_they_are(
        self, sums: list[Added], amounts: list[Amount], body: cst.CSTNode
    ) -> set[str]:
        """Return variables of which a loop adds to elements in a way not understood.

        None of their elements is reduced: a ratio of one that is and one that is not
        would be wrong by a factor. `_rank_values` lists the variable.
        """
        unknown = {
            base_of(added.name)
            for added, amount in zip(sums, amounts, strict=True)
            if amount is Amount.UNKNOWN
            and (base_of(added.name) != added.name or added.index is not None)
        }
        known = {id(added.statement) for added in sums}
        names = unknown | {base_of(added.name) for added in sums}
        changed: set[str] = set()
        lines: Iterator[cst.Assign | cst.AugAssign]
        lines = found(body, (cst.Assign, cst.AugAssign))
        stored = [
            (target.value.value, line)
            for line in lines
            for target in targets_of(line)
            if isinstance(target, cst.Subscript)
            and isinstance(target.value, cst.Name)
            and target.value.value in names
            and id(line) not in known
        ]
        for base, line in stored:
            reads = any(name.value == base for name in found(line.value, cst.Name))
            if isinstance(line, cst.AugAssign) or reads:
                changed.add(base)
                self._left.add(id(line.value))
        return unknown | changed

    def _carry(self, added: Added, loop: BatchLoop) -> None:
        """Note that a loop's sum has in it only what is equal on all ranks, or reduced.

        ``a = a + x`` is then read as ``a += x`` is.
        """
        if added.whole is None:
            return
        made = [
            o.value
            for o in self._work.flow.assigned(added.name, loop.scope)
            if self._tree.within(o.statement, loop.node.body)
        ]
        sums = {id(a.whole) for a in added_in(loop.node.body) if a.name == added.name}
        if all(id(value) in sums for value in made):
            self._classify.carried.add(added.whole)

    def _is_one_kind(self, name: str, sums: list[Added], amounts: list[Amount]) -> bool:
        """Return whether all that a loop adds to a name combines in one way.

        Otherwise its parts are reduced one by one: a sum over ranks of a number that
        is the same on each would count it once for each rank.
        """
        kinds = {
            Amount.MEAN if amount is Amount.UNKNOWN else amount
            for added, amount in zip(sums, amounts, strict=True)
            if added.name == name and not is_zero(added.value)
        }
        return len(kinds) == 1 or kinds == {Amount.MEAN, Amount.SAME}

    def _reduce_after(self, loop: BatchLoop, names: list[str], amount: Amount) -> None:
        if not names:
            return
        self.reduced_after.append((loop.node, names))
        listed = ", ".join(self._texts.get(name, name) for name in names)
        own = theirs(listed)
        line = f"{own} = {amount.value}_over_ranks({own})"
        trains = self._work.passes.get(loop.node)
        if trains is not None:
            line = f"if {theirs(trains)}:\n    {line}"
        self._work.after(loop.node, line)
        how = "averaged" if amount is Amount.MEAN else "summed"
        self._work.done(loop.node, f"{listed}: {how} over ranks after the loop")

    def _reduce(self, node: cst.BaseExpression, amount: Amount) -> None:
        self._handled.add(id(node))
        if amount is Amount.SUM:
            self._summed.append(node)
        if self._work.is_guarded(node):
            self._work.undecided(
                node, f"`{self._tree.text(node)}` is rank 0's only, not all ranks'"
            )
            return
        function = f"{amount.value}_over_ranks"
        trains = self._condition(node)
        if trains is None:
            self._work.call_around(node, function)
            if amount is Amount.SUM and self._is_after_pass(node):
                self._work.undecided(
                    node,
                    f"`{self._tree.text(node)[:60]}` is summed over ranks; if it is of "
                    "a pass that does not train, each rank has the whole sum already",
                )
        else:
            func = self._work.expression(function)
            test = cst.parse_expression(trains)
            self._work.change(node, partial(_if_trains, func=func, test=test))
        how = "averaged" if amount is Amount.MEAN else "summed"
        self._work.done(node, f"`{self._tree.text(node)[:60]}` {how} over ranks")

    def _condition(self, node: cst.CSTNode) -> str | None:
        """Return the name of what is true if a number is of a pass that trains."""
        before: list[cst.CSTNode] = []
        function = self._tree.function(node)
        if function is not None and self._also_evaluates(function):
            trains = trains_in(self._work, function)
            tracks = trains is not None and "is_grad_enabled()" in trains
            return None if tracks and self._tree.without_gradient(node) else trains
        for loop, name in self._work.passes.items():
            if self._tree.within(node, loop):
                return name
            if (
                self._tree.within(node, self._tree.block(loop))
                and self._tree.function(node) is self._tree.function(loop)
                and self._tree.line(node) > self._tree.line(loop)
            ):
                before.append(loop)
        return self._work.passes[max(before, key=self._tree.line)] if before else None

    def _also_evaluates(self, function: cst.FunctionDef) -> bool:
        """Return whether a function that trains is also called where nothing does."""
        idle, passes = self._work.job.batches.idle, self._work.passes
        if not any(
            self._tree.function(call) is function for call in self._work.job.backwards
        ):
            return False
        waiting, seen = [function], {function}
        while waiting:
            for call in self._work.flow.calls_of(waiting.pop()):
                if call in idle or any(self._tree.within(call, x) for x in passes):
                    return True
                caller = self._tree.function(call)
                if caller is not None and caller not in seen:
                    seen.add(caller)
                    waiting.append(caller)
        return False

    def _is_after_pass(self, node: cst.CSTNode) -> bool:
        """Return whether a function has a loop above that does not always train."""
        function = self._tree.function(node)
        if function is not None and self._also_evaluates(function):
            return True
        return any(
            self._tree.function(node) is self._tree.function(loop)
            and self._tree.line(node) > self._tree.line(loop)
            for loop in self._work.passes
        )

    def _is_handled(self, node: cst.CSTNode) -> bool:
        """Return whether a node, its surroundings, or its content is reduced."""
        around = [node, *self._tree.ancestors(node)]
        if any(id(a) in self._handled for a in around):
            return True
        return any(id(n) in self._handled for n in found(node, cst.BaseExpression))

    def _is_in_reduced(
        self, node: cst.CSTNode, seen: frozenset[str] = frozenset()
    ) -> bool:
        """Return whether a number is only used in numbers that are reduced later.

        It goes into them through variables: ``right = ...; share = right / len(y)``.
        """
        statement = next(
            (a for a in self._tree.ancestors(node) if isinstance(a, cst.Assign)), None
        )
        if statement is None or len(statement.targets) != 1:
            return False
        target = statement.targets[0].target
        if not isinstance(target, cst.Name) or target.value in seen:
            return False
        scope = self._tree.function(statement)
        where: cst.CSTNode = self._tree.module if scope is None else scope.body
        reads = [
            name
            for name in found(where, cst.Name)
            if name.value == target.value
            and not isinstance(self._tree.parent(name), cst.AssignTarget)
        ]
        seen |= {target.value}
        # A variable of a number's variable may be unused.
        return (bool(reads) or len(seen) > 1) and all(
            self.is_within_reduced(name) or self._is_in_reduced(name, seen)
            for name in reads
        )

    def _numbers_in(self, node: cst.BaseExpression) -> bool:
        return any(
            self._tree.method_called(c, "item") is not None
            or self._tree.called(c) == "float"
            for c in found(node, cst.Call)
        )

    def _at_source(
        self, body: cst.CSTNode, scope: Scope, *, after: cst.CSTNode | None = None
    ) -> None:
        """Reduce each number taken out of a tensor of this rank's batch.

        With ``after``, reduce those of a block's variables after it, not those in the
        block.
        """
        where: cst.CSTNode = body
        if after is not None:
            where = self._tree.module if scope is None else scope.body
        for call in found(where, cst.Call):
            on = self._tree.method_called(call, "item")
            if on is None and self._tree.called(call) == "float" and call.args:
                on = call.args[0].value
            if on is None or self._is_handled(call) or self._is_in_reduced(call):
                continue
            if any(id(a) in self._left for a in (call, *self._tree.ancestors(call))):
                continue
            if self._is_of_reduced_sums(call):
                continue
            if after is not None and (
                self._tree.function(call) is not scope
                or self._tree.within(call, after)
                or self._tree.line(call) < self._tree.line(after)
                or not self._in_body(on, body)
                or self._is_of_later_loop(call, on, after)
            ):
                continue
            if self._work.proofs.is_summed(call):
                self._reduce(call, Amount.SUM)
                continue
            amount = self._classify.of(on, body)
            if amount in (Amount.UNKNOWN, Amount.SAME):
                amount = self._classify.of(call, body)
            whole = self._widest(call, body)
            node: cst.BaseExpression = call
            if whole is not call and not self._is_handled(whole):
                node, amount = whole, self._classify.of(whole, body)
            if amount is Amount.SAME and not (
                self._in_body(on, body) and self._shares.is_share(on)
            ):
                continue
            if self._tree.without_gradient(call) and not any(
                self._loaders.is_divided(made)
                for around in self._tree.loops(call)
                if (made := self._work.job.batches.loop(around)) is not None
            ):
                continue
            if amount is not Amount.SAME and (kept := self._sum_in(on)) is not None:
                self._work.undecided(
                    call,
                    f"`{self._tree.text(call)[:60]}` is computed from `{kept}`, in "
                    "which each rank adds up its own samples: it is averaged over "
                    "ranks, which is not that of one process. Sum "
                    f"`{kept}` over ranks after its loop (torch.distributed."
                    "all_reduce), before it is read",
                )
                node, amount = call, Amount.MEAN
            elif amount not in (Amount.MEAN, Amount.SUM):
                if amount is Amount.UNKNOWN:
                    self._work.undecided(
                        call,
                        f"whether `{self._tree.text(call)[:60]}` is a mean or a sum "
                        "over each rank's samples: it is averaged over ranks",
                    )
                amount = Amount.MEAN
            self._reduce(node, amount)
        if after is None:
            self._shown(body)
            for call in found(body, cst.Call):
                self._beside(call, body)
            self._decided(body)

    def _is_of_reduced_sums(self, node: cst.BaseExpression) -> bool:
        """Return whether a number reads loops' sums and is equal on all ranks by now.

        Reducing it again would count the sums once for each rank.
        """
        if self._now is None:
            return False
        sums = {base_of(n) for _, names in self.reduced_after for n in names}
        sums |= self._each_step
        return bool(sums & self._reads(node)) and not self._now.is_share(node)

    def _sum_in(self, node: cst.BaseExpression) -> str | None:
        """Return a sum of a loop that differs by rank and of which a number is read.

        The sum of its elements is the sum over ranks, but other functions of it are no
        sums or means over samples.
        """
        if self._now is None or not self._now.is_share(node):
            return None
        inner = node
        while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
            if inner.func.attr.value not in ("sum", "detach", "cpu"):
                break
            inner = inner.func.value
        plain = dotted(inner)
        reads = self._reads(node)
        for loop in self._after:
            lines: Iterator[cst.AugAssign] = found(loop.node.body, cst.AugAssign)
            for line in lines:
                target: cst.BaseExpression = line.target
                while isinstance(target, cst.Subscript):
                    target = target.value
                name = dotted(target)
                if (
                    name is not None
                    and name in reads
                    and name != plain
                    and name not in self._graph
                    and isinstance(line.operator, cst.AddAssign)
                    and self._tree.line(node) > self._tree.line(loop.node)
                    and not self._tree.within(node, loop.node)
                    and not self._sets(name, loop)
                    and self._now.is_share(line.value)
                ):
                    return name
        return None

    def _sets(self, name: str, loop: BatchLoop) -> bool:
        """Return whether a loop's body sets a name, so that it keeps nothing."""
        return any(
            self._tree.within(o.statement, loop.node.body)
            for o in self._work.flow.assigned(name, loop.scope)
        )

    def _reads(self, node: cst.BaseExpression) -> set[str]:
        """Return the names that a value is computed from in its function."""
        scope, out = self._tree.function(node), set[str]()
        waiting: list[cst.CSTNode] = [node]
        while waiting:
            for part in found(waiting.pop(), (cst.Name, cst.Attribute)):
                name = dotted(part)
                if name is not None and name not in out:
                    out.add(name)
                    waiting += [o.value for o in self._work.flow.assigned(name, scope)]
        return out

    def _widest(
        self, call: cst.BaseExpression, body: cst.CSTNode
    ) -> cst.BaseExpression:
        """Return the widest calculation around a number that is still a mean or a sum.

        A sum divided by this rank's count is a mean, but its parts are not.
        """
        out = node = call
        while isinstance(above := self._tree.parent(node), cst.BinaryOperation):
            node = above
            if self._classify.of(node, body) in (Amount.MEAN, Amount.SUM):
                out = node
        return out

    def _in_body(self, node: cst.BaseExpression, body: cst.CSTNode) -> bool:
        first = next(iter(found(node, cst.Name)), None)
        if first is None:
            return False
        return any(
            self._tree.within(o.statement, body)
            and o.value not in self._classify.carried
            for o in self._work.flow.assigned(first.value, self._tree.function(node))
        )

    def _is_of_later_loop(
        self, call: cst.Call, on: cst.BaseExpression, loop: cst.CSTNode
    ) -> bool:
        """Return whether a later training loop has set the variable that is read."""
        first = next(iter(found(on, cst.Name)))
        line = self._tree.line(call)
        made = self._work.flow.assigned(first.value, self._tree.function(call))
        return any(
            self._tree.line(o.statement) < line
            and self._tree.within(o.statement, later.node)
            and not self._tree.within(loop, later.node)
            and not self._tree.within(later.node, loop)
            and self._tree.line(later.node) > self._tree.line(loop)
            for later in self._work.job.training
            for o in made
        )

    def _shown(self, body: cst.CSTNode) -> None:
        """Handle a loss that is shown as a tensor, without ``item()``."""
        for call in found(body, cst.Call):
            last = self._tree.called(call).rpartition(".")[2]
            if last not in SHOWING and not isinstance(call.func, cst.Attribute):
                continue
            if (
                isinstance(call.func, cst.Attribute)
                and call.func.attr.value not in SHOWING
            ):
                continue
            if (
                isinstance(call.func, cst.Attribute)
                and dotted(call.func.value) in self._graph
            ):
                continue  # a list of losses that gradients flow through
            for argument in call.args:
                self._counted(argument, body)
                in_loop = isinstance(self._tree.parent(body), cst.For | cst.While)
                if last == "print" and in_loop:
                    self._named_numbers(argument, body)
                for name in found(argument.value, cst.Name):
                    if (
                        name.value in self._losses
                        and not self._is_handled(name)
                        and not isinstance(self._tree.parent(name), cst.Attribute)
                        and isinstance(
                            self._tree.parent(name),
                            cst.Arg | cst.FormattedStringExpression | cst.DictElement,
                        )
                    ):
                        amount = self._classify.of(name, body)
                        if amount is not Amount.SAME:
                            self._reduce(name, amount)

    def _named_numbers(self, argument: cst.Arg, body: cst.CSTNode) -> None:
        """Handle a tensor's number that is shown under a name of the step."""
        shown = [f.expression for f in found(argument, cst.FormattedStringExpression)]
        for name in (argument.value, *shown):
            if not isinstance(name, cst.Name) or self._is_handled(name):
                continue
            made = [
                o
                for o in self._work.flow.assigned(name.value, self._tree.function(name))
                if self._tree.within(o.statement, body)
                and o.value not in self._classify.carried
            ]
            if not made or any(self._is_handled(o.value) for o in made):
                continue
            if len(made) == 1 and self._shown_names.only(name):
                self._counted_in(made[0].value, body)
                if self._is_handled(made[0].value):
                    continue
            amount = self._classify.of(name, body)
            if amount is Amount.MEAN:
                self._reduce(name, amount)
            elif amount is Amount.UNKNOWN:
                self._handled.add(id(name))
                self._work.undecided(
                    name, f"whether `{name.value}` differs by rank: rank 0's is shown"
                )

    def _counted(self, argument: cst.Arg, body: cst.CSTNode) -> None:
        """Handle the number of processed samples, which is shown with the progress."""
        nodes = [argument.value]
        nodes += [f.expression for f in found(argument, cst.FormattedStringExpression)]
        inner = [a.value for c in found(argument.value, cst.Call) for a in c.args]
        inner += [e.value for t in found(argument.value, cst.Tuple) for e in t.elements]
        for node in [*nodes, *inner]:
            if isinstance(node, cst.BinaryOperation) and not self._is_handled(node):
                self._counted_in(node, body)

    def _counted_in(self, node: cst.BaseExpression, body: cst.CSTNode) -> None:
        """Reduce a calculation with a number of samples, or the parts that differ."""
        counts = any(
            self._in_body(a.value, body) or self._of_loop(a.value, body)
            for c in found(node, cst.Call)
            if self._tree.called(c) == "len"
            for a in c.args
        ) or any(
            self._tree.method_called(c, "size") is not None
            for c in found(node, cst.Call)
        )
        if not counts or self._is_of_reduced_sums(node):
            return
        amount = self._classify.of(node, body)
        if amount is Amount.SUM:
            self._reduce(node, amount)
        elif amount is Amount.UNKNOWN and isinstance(node, cst.BinaryOperation):
            for part in (node.left, node.right):
                self._counted_in(part, body)

    def _beside(self, call: cst.Call, body: cst.CSTNode) -> None:
        """Reduce counts, and results of functions, given beside reduced numbers."""
        numbers = [
            a.value
            for a in call.args
            if any(id(n) in self._handled for n in found(a.value, cst.BaseExpression))
        ]
        if not numbers or not isinstance(self._tree.parent(call), cst.Expr):
            return
        for argument in call.args:
            node = argument.value
            if self._is_handled(node) or argument.star:
                continue
            if self._is_count(node, body):
                self._reduce(node, Amount.SUM)
            elif isinstance(node, cst.Call) and self._work.calls.functions(node):
                amount = self._classify.of(node, body)
                if amount in (Amount.MEAN, Amount.SUM):
                    self._reduce(node, amount)

    def _is_count(self, node: cst.BaseExpression, body: cst.CSTNode) -> bool:
        """Return whether an expression is a number of samples, or of elements."""
        on: cst.BaseExpression | None = None
        if isinstance(node, cst.Call):
            on = self._tree.method_called(node, "numel", "size", "nelement")
            if self._tree.method_called(node, "size") is not None and (
                not node.args or self._tree.text(node.args[0]) != "0"
            ):
                return False
            if self._tree.called(node) == "len" and node.args:
                on = node.args[0].value
        elif isinstance(node, cst.Subscript):
            base = node.value
            first = self._tree.text(node.slice[0].slice) == "0"
            if isinstance(base, cst.Attribute) and base.attr.value == "shape" and first:
                on = base.value
        elif isinstance(node, cst.Name):
            made = [
                o
                for o in self._work.flow.assigned(node.value, self._tree.function(node))
                if self._tree.within(o.statement, body)
            ]
            return len(made) == 1 and (
                made[0].place is None and self._is_count(made[0].value, body)
            )
        return (
            on is not None
            and (self._in_body(on, body) or self._of_loop(on, body))
            and self._shares.is_share(on)
        )

    def _of_loop(self, node: cst.BaseExpression, body: cst.CSTNode) -> bool:
        """Return whether a name is a target of the loop around a block."""
        loop = self._tree.parent(body)
        return isinstance(loop, cst.For) and dotted(node) in {
            n.value for n in found(loop.target, cst.Name)
        }

    def _decided(self, body: cst.CSTNode) -> None:
        """List a decision on a tensor that differs by rank."""
        for node in found(body, cst.If):
            for name in found(node.test, cst.Name):
                if name.value in self._losses and not self._is_handled(name):
                    self._work.undecided(
                        node,
                        f"this decides on `{name.value}`, which differs by rank: if "
                        "ranks take different branches here, they hang waiting for "
                        "each other",
                    )

    # Evaluation

    def _evaluation(self, loop: BatchLoop) -> None:
        node = loop.node
        if not isinstance(node, cst.For):
            return
        work = self._work
        reason = self._sums.why_not_summable(node)
        if any(id(source) in self._given for source, _ in loop.loaders):
            reason = "its batches come through a generator"
        if reason is not None:
            work.know(
                node,
                f"every rank runs all of this evaluation, which is not divided "
                f"({reason}), so its results are those of one process; random numbers "
                "and the order of samples are rank 0's",
            )
            self._whole_on_all(loop)
            return
        names = list(dict.fromkeys(a.name for a in added_in(node.body)))
        whole = work.choices.evaluation is Evaluation.RANK0
        for source, _ in loop.loaders:
            self._given.add(id(source))
            if node in work.shared:
                work.call_around(source, "undivided")
            work.call_around(source, "whole_on_rank0" if whole else "share_of")
        self._reduce_after(loop, names, Amount.SUM)
        self._handled |= {id(n) for n in found(node, cst.BaseExpression)}
        who = (
            "rank 0 evaluates" if whole else "each rank evaluates its share of batches"
        )
        work.done(node, who)


def _if_trains(
    node: cst.BaseExpression, func: cst.BaseExpression, test: cst.BaseExpression
) -> cst.BaseExpression:
    """Return ``(function(node) if test else node)``."""
    return cst.IfExp(
        test=test,
        body=cst.Call(func=func, args=[cst.Arg(value=node)]),
        orelse=as_one(node.deep_clone()),
        lpar=[cst.LeftParen()],
        rpar=[cst.RightParen()],
    )


def _times(node: cst.BaseExpression, factor: cst.BaseExpression) -> cst.BaseExpression:
    """Return the product in parentheses."""
    return cst.BinaryOperation(
        left=grouped(node),
        operator=cst.Multiply(),
        right=factor,
        lpar=[cst.LeftParen()],
        rpar=[cst.RightParen()],
    )
