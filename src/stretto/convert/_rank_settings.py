"""List settings, seeds and data that differ by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._models import reaching_training
from stretto.convert._replica_notes import target_of
from stretto.convert._tree import argument, found

if TYPE_CHECKING:
    from stretto.convert._replica_notes import ReplicaNotes
    from stretto.convert._trained_models import Optimizer
    from stretto.convert._tree import Scope

_SEEDING = (
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "transformers.set_seed",
)

_UPDATING = ("torch.optim.swa_utils.update_bn", "torch.optim.swa_utils.bn_update")


@final
class RankSettings:
    """Notes on settings, data and seeds that make the ranks' models differ."""

    def __init__(self, on: ReplicaNotes) -> None:
        self._on = on
        self._note, self._short = on.note, on.short
        self._work, self._tree, self._flow = on.work, on.work.tree, on.work.flow
        self._values, self._sources, self._parts = on.values, on.sources, on.parts
        self._begins = on.begins
        self._training = reaching_training(on.work)

    def _is_group(self, target: cst.Subscript) -> bool:
        """Return whether a target is a setting of an optimizer's group."""
        index = target.slice[0].slice
        if not isinstance(index, cst.Index):
            return False
        if not isinstance(index.value, cst.SimpleString):
            return False
        if "param_groups" in self._tree.text(target.value):
            return True
        return isinstance(target.value, cst.Name) and any(
            "param_groups" in self._tree.text(over)
            for over in self._parts.loops_over(target.value)
        )

    def assigned(self, node: cst.Assign | cst.AugAssign) -> bool:
        """List a setting of an optimizer's group; return whether it is one."""
        target = target_of(node)
        if not isinstance(target, cst.Subscript) or not self._is_group(target):
            return False
        scope = self._tree.function(node)
        self.setting(node.value, scope, self._tree.text(target))
        return True

    def setting(self, value: cst.BaseExpression, scope: Scope, name: str) -> None:
        """List a setting whose value differs by rank."""
        drawn = self._sources.draw(value, scope)
        if drawn is None and not self._values.differs(value):
            return
        why = (
            f"random numbers (`{self._short(drawn)}`), of which each rank draws its "
            "own since training began"
            if drawn is not None
            else "values of each rank's own samples"
        )
        self._note(
            value,
            f"{name} is set from {why}: ranks train with different settings, and their "
            "models become different. Take the value from `random` or NumPy with a "
            "seed, or reduce it over ranks",
        )

    def data(self) -> None:
        """List data sets that are made with random numbers of a rank."""
        for loop in self._work.job.training:
            for origin in loop.origins:
                made = origin.value
                for given in made.args if isinstance(made, cst.Call) else ():
                    drawn = self._sources.draw(given.value, origin.scope)
                    if drawn is not None:
                        self._note_data(made, drawn)

    def _note_data(self, made: cst.CSTNode, drawn: cst.Call) -> None:
        self._note(
            made,
            f"the data set is made with `{self._short(drawn)}`, and since training "
            "began each rank draws its own random numbers, so ranks divide different "
            "data sets. Give the call a generator with a seed, or draw with `random` "
            "or NumPy",
        )

    def samples(self, loop: cst.For) -> None:
        """List a loop over drawn samples, rather than over a loader, that trains."""
        if any(loop is t.node for t in self._work.job.training):
            return
        drawn = self._sources.draw(loop.iter, self._tree.function(loop))
        trains = any(
            c in self._work.job.backwards
            or any(f in self._training for f in self._flow.local(c))
            for c in found(loop.body, cst.Call)
        )
        if drawn is not None and trains:
            self._note(
                loop,
                f"this trains on what `{self._short(drawn)}` draws, and since training "
                "began each rank draws its own random numbers: a step takes other "
                "samples on each rank. Take the samples from a DataLoader",
            )

    def statistics(self, call: cst.Call) -> None:
        """List statistics that are computed of one rank's samples."""
        if self._tree.called(call) not in _UPDATING or not call.args:
            return
        if call in self._work.whole:
            return  # it gets all samples
        loader = call.args[0].value
        origins = self._work.job.batches.taken(loader, self._tree.function(call))
        keys = {o.key for loop in self._work.job.training for o in loop.origins}
        if any(o.key in keys for o in origins):
            self._note(
                call,
                f"`{self._short(call)}` computes statistics of each rank's own "
                "samples, so the saved ones are rank 0's. Give it a loader of all "
                "samples",
            )

    def closures(self, optimizer: Optimizer) -> None:
        """Reduce the loss by which an optimizer decides how far to go."""
        if self._tree.called(optimizer.call).rpartition(".")[2] != "LBFGS":
            return
        for call in self._tree.calls:
            given = argument(call, 0, "closure")
            if given is None or self._tree.method_called(call, "step") is None:
                continue
            function = self._on.named(given)
            if function is None:
                continue
            for value in self._flow.returned(function):
                if id(value) in self._on.reported or not self._values.differs(value):
                    continue
                self._on.reported.add(id(value))
                self._work.call_around(value, "mean_over_ranks")
                self._work.done(
                    value,
                    f"`{self._short(value)}`, by which the optimizer decides, is the "
                    "mean over ranks",
                )

    def seed(self, call: cst.Call) -> None:
        """List a seed that is set on all ranks while they train."""
        if self._tree.called(call) not in _SEEDING or not self._sources.is_late(call):
            return
        begins = self._begins
        around = isinstance(begins, cst.For | cst.While) and self._tree.within(
            call, begins.body
        )
        if around or any(
            self._tree.within(caller, begins) for caller in self._callers_of(call)
        ):
            self._note(
                call,
                f"`{self._short(call)}` sets one seed on all ranks while they train: "
                "from here on they draw the same numbers (dropout, noise) for "
                "different samples. Add the rank to the seed, unless parameters or "
                "decisions are drawn from it",
            )

    def _callers_of(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls that lead to a node."""
        out: list[cst.Call] = []
        waiting = [self._tree.function(node)]
        seen: set[int] = set()
        while waiting:
            scope = waiting.pop()
            if scope is None or id(scope) in seen:
                continue
            seen.add(id(scope))
            calls = self._flow.calls_of(scope)
            out += calls
            waiting += [self._tree.function(c) for c in calls]
        return out

    def trial(self, call: cst.Call) -> None:
        """List a random argument of a function that trains."""
        if not any(f in self._training for f in self._flow.local(call)):
            return
        if self._sources.is_in_step(call):
            return
        scope = self._tree.function(call)
        for given in call.args:
            drawn = self._sources.draw(given.value, scope)
            if drawn is not None:
                self._note(
                    call,
                    f"`{self._short(call)}` trains with a value drawn by "
                    f"`{self._short(drawn)}`, and since training began each rank draws "
                    "its own random numbers: ranks train with different values. Draw "
                    "with `random` or NumPy, or set a seed before (torch.manual_seed)",
                )
                return
