"""Divide the training loaders, and set the epoch on their samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

import libcst as cst

from stretto.convert import _collate, _passes
from stretto.convert._batch import steps
from stretto.convert._device import may_download
from stretto.convert._edit import appended, theirs
from stretto.convert._flow import Origin, parameters
from stretto.convert._tree import Scope, argument, arguments_of, dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.convert._batch_loops import BatchLoop
    from stretto.convert._edit import Work

_KNOWN_SAMPLERS = tuple(
    f"{module}{kind}"
    for module in ("", "torch.utils.data.", "torch.utils.data.sampler.")
    for kind in ("RandomSampler", "SequentialSampler")
)
"""The samplers that `shuffle` stands for."""

_OFF = ("False", "None")

_PROGRESS = ("range", "trange", "tqdm.trange", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm")


@final
class Loaders:
    """The loaders that training loops take their batches from."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tree, self._flow = work.tree, work.flow
        self._evaluated = {
            loop.node: _passes.evaluated(work, loop) for loop in work.job.training
        }
        origins = [
            o
            for loop in work.job.training
            for o in loop.origins
            if o.key not in self._evaluated[loop.node]
        ]
        self._origins = list({o.key: o for o in origins}.values())
        self._ids = {o.key for o in self._origins}
        self.batch_sizes: list[cst.BaseExpression] = []
        """The batch sizes of the divided loaders, as the script writes them."""
        self.without_size: list[cst.BaseExpression] = []
        """The expressions that make divided loaders whose batch size no call has."""
        self.steps = list(steps(work))
        """Bodies of training loops, and of the functions that they call."""

    def is_divided(self, loop: BatchLoop) -> bool:
        """Return whether a loop's batches are this rank's only."""
        return loop.node not in self._work.whole and self.has_divided(loop.origins)

    def divides(self, node: cst.CompFor) -> bool:
        """Return whether a comprehension's batches are this rank's only."""
        taken = self._work.job.batches.taken(node.iter, self._tree.function(node))
        return node not in self._work.whole and self.has_divided(taken)

    def is_divided_call(self, call: cst.Call) -> bool:
        """Return whether what a call makes is divided."""
        return any(key[0] == id(call) for key in self._ids)

    def has_divided(self, origins: Iterable[Origin]) -> bool:
        """Return whether the loader of one of several origins is divided."""
        return any(o.key in self._ids for o in origins)

    def convert(self) -> None:
        """Divide the loaders and put ``set_epoch`` before their loops."""
        for origin in self._origins:
            self._divide(origin)
        for loop in self._work.job.training:
            self._set_epoch(loop)

    # Dividing

    def _divide(self, origin: Origin) -> None:
        call = origin.value
        if not isinstance(call, cst.Call) or not self._work.job.batches.is_loader(call):
            self._divide_later(origin)
            return
        self._check(call)
        starred = any(a.star for a in call.args)
        data = argument(call, 0, "dataset")
        plain = data is not None and (
            dotted(data) is not None
            or (isinstance(data, cst.Subscript) and dotted(data.value) is not None)
        )
        if starred or data is None or not (plain or self._can_hoist(origin)):
            self._note_size(call)
            self._work.call_around(call, "divided")
            self._work.done(
                call,
                "the loader is divided among ranks when it is created"
                + ("" if self._work.choices.per_rank_batch else self._batch_note()),
            )
            return
        name = self._tree.text(data) if plain else self._hoist(origin, data)
        self._rewrite(call, name)

    def _divide_later(self, origin: Origin) -> None:
        """Handle a loader that a function returned."""
        self._check_class(origin)
        if self._tree.called(origin.value) in ("list", "tuple"):
            raise self._work.job.refuse(
                origin.value,
                "training takes its batches from a list of them, which cannot be "
                "divided among ranks. Loop over the DataLoader itself",
            )
        self._note_sizes_below(origin)
        text = self._tree.text(origin.value)[:50]
        if origin.path is None:
            self._work.call_around(origin.value, "divided")
        else:
            self._work.after(
                origin.statement,
                f"{theirs(origin.path)} = divided({theirs(origin.path)})",
            )
        self._work.done(
            origin.value,
            f"the loader that `{text}` returns is divided among ranks"
            + ("" if self._work.choices.per_rank_batch else self._batch_note()),
        )

    def _check_class(self, origin: Origin) -> None:
        """Refuse a loader of a class of the script, whose batches are its own."""
        reached = [(origin.value, origin.scope, origin.place)]
        seen: set[int] = set()
        while reached:
            value, scope, place = reached.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            name = dotted(value.func) if isinstance(value, cst.Call) else None
            kind = self._tree.classes.get(name or "")
            if isinstance(value, cst.Call) and self._work.job.batches.is_loader(value):
                self._check_returned(value, scope)
            if kind is not None and not self._is_plain_loader(kind):
                raise self._work.job.refuse(
                    value,
                    f"training takes its batches from a `{name}`, a class of this "
                    "script, so its samples cannot be divided among ranks. Loop over "
                    "the DataLoader itself, and do in the loop, in collate_fn or in "
                    f"the dataset what `{name}` does to a batch",
                )
            reached += [
                (o.value, o.scope, o.place)
                for more, inner, _ in self._flow.same_object(value, scope, place)
                for o in self._flow.origins(more, inner)
            ]

    def _check_returned(self, call: cst.Call, scope: Scope) -> None:
        """Refuse a loader of a function whose own sampler certainly chooses samples."""
        _, named = arguments_of(call)
        for name in ("sampler", "batch_sampler"):
            given = named[name].value if name in named else None
            made = self._flow.origins(given, scope) if given is not None else []
            if made and all(self._chooses(o.value) for o in made):
                self._refuse_sampler(call, name, made[0].value)

    def _chooses(self, made: cst.BaseExpression) -> bool:
        """Return whether a sampler certainly is another one than `shuffle` gives."""
        if not isinstance(made, cst.Call):
            return False
        kind = self._tree.called(made)
        return bool(kind) and not self._is_plain_sampler(made)

    def _is_plain_sampler(self, made: cst.Call) -> bool:
        """Return whether a sampler goes through its data once, as `shuffle` does."""
        if self._tree.called(made) not in _KNOWN_SAMPLERS:
            return False
        data = argument(made, 0, "data_source")
        if data is None or any(a.star for a in made.args):
            return False
        given = {
            name: self._tree.text(value)
            for place, name in enumerate(("replacement", "num_samples", "generator"), 1)
            if (value := argument(made, place, name)) is not None
        }
        known = ("None", f"len({self._tree.text(data)})")
        return (
            given.get("replacement", "False") == "False"
            and given.get("num_samples", "None") in known
            and given.get("generator", "None") == "None"
        )

    def _as_shuffle(self, call: cst.Call) -> str | None:
        """Return what `shuffle` is in place of a loader's sampler, if it is any."""
        sampler = argument(call, -1, "sampler")
        if sampler is None:
            return None
        scope = self._tree.function(call)
        data = argument(call, 0, "dataset")
        made = self._flow.origins(sampler, scope)
        shuffle = argument(call, 2, "shuffle")
        if (
            data is None
            or len(made) != 1
            or not isinstance(made[0].value, cst.Call)
            or not self._is_plain_sampler(made[0].value)
            or (shuffle is not None and self._tree.text(shuffle) not in _OFF)
        ):
            return None
        source = argument(made[0].value, 0, "data_source")
        if source is None or not self._is_same(source, data, made[0], scope):
            return None
        kind = self._tree.called(made[0].value).rpartition(".")[2]
        return str(kind == "RandomSampler")

    def _is_same(
        self,
        source: cst.BaseExpression,
        data: cst.BaseExpression,
        sampler: Origin,
        scope: Scope,
    ) -> bool:
        """Return whether a sampler and its loader certainly have the same data."""
        on = data.value if isinstance(data, cst.Subscript) else data
        if self._tree.text(source) != self._tree.text(data) or dotted(on) is None:
            return False
        if sampler.path is None:
            return True  # made within the loader's call
        first = self._flow.origins(source, sampler.scope)
        second = self._flow.origins(data, scope)
        return (
            len(first) == len(second) == 1
            and first[0].key == second[0].key
            and not isinstance(data, cst.Subscript)
        )

    def _refuse_sampler(
        self, call: cst.Call, name: str, given: cst.BaseExpression
    ) -> NoReturn:
        raise self._work.job.refuse(
            call,
            f"the training loader has its own {name} "
            f"(`{self._tree.text(given)[:50]}`), which cannot be divided among ranks "
            "without knowing what it does. Draw samples with shuffle=True (a subset "
            "with torch.utils.data.Subset), or divide this loader by hand in a "
            "distributed script",
        )

    def _is_plain_loader(self, kind: cst.ClassDef) -> bool:
        """Return whether a class is a DataLoader that batches as DataLoader does."""
        bases = {(dotted(b.value) or "").rpartition(".")[2] for b in kind.bases}
        return "DataLoader" in bases and not any(
            f.name.value == "__iter__" for f in found(kind.body, cst.FunctionDef)
        )

    def _note_size(self, call: cst.Call) -> None:
        size = argument(call, 1, "batch_size")
        if size is not None:
            self.batch_sizes.append(size)
        else:
            self.without_size.append(call)

    def _note_sizes_below(self, origin: Origin) -> None:
        """Note the batch sizes of the loaders that a function of the script makes."""
        made: list[cst.Call] = []
        waiting: list[tuple[cst.BaseExpression, Scope]] = [(origin.value, origin.scope)]
        seen: set[int] = set()
        while waiting:
            call, scope = waiting.pop()
            if not isinstance(call, cst.Call) or id(call) in seen:
                continue
            seen.add(id(call))
            bodies: list[cst.CSTNode] = [f.body for f in self._flow.local(call)]
            for callee in self._flow.origins(call.func, scope):
                if isinstance(callee.value, cst.Lambda):
                    bodies.append(callee.value.body)
                elif self._work.job.batches.makes_loaders(callee.value):
                    named = argument(call, -1, "batch_size") is not None
                    if named or not isinstance(callee.value, cst.Call):
                        made.append(call)
                    else:
                        made.append(callee.value)
            for body in bodies:
                for inner in found(body, cst.Call):
                    if self._work.job.batches.is_loader(inner):
                        made.append(inner)
                    else:
                        waiting.append((inner, self._tree.function(inner)))
        for call in made:
            _collate.point_out(self._work, call)
            self._note_size(call)
        if not made:
            self.without_size.append(origin.value)

    def _batch_note(self) -> str:
        return "; its batch size stays that of all ranks together"

    def _check(self, call: cst.Call) -> None:
        refuse = self._work.job.refuse
        _collate.point_out(self._work, call)
        for name in ("sampler", "batch_sampler"):
            given = argument(call, 3 if name == "sampler" else 4, name)
            plain = name == "sampler" and self._as_shuffle(call) is not None
            if given is not None and self._tree.text(given) != "None" and not plain:
                self._refuse_sampler(call, name, given)
        data = argument(call, 0, "dataset")
        made = self._flow.origins(data, self._tree.function(call)) if data else []
        for origin in made:
            made_by = origin.value.func if isinstance(origin.value, cst.Call) else None
            name = dotted(made_by) or ""
            kind = self._tree.classes.get(name)
            if kind is not None and any(
                (self._tree.full(b.value) or "").endswith("IterableDataset")
                for b in kind.bases
            ):
                raise refuse(
                    call,
                    f"{name} is an IterableDataset, which only itself can divide. Make "
                    "its __iter__ skip the samples of other ranks (RANK, WORLD_SIZE), "
                    "or give it a length and __getitem__",
                )

    def _check_size(self, call: cst.Call, size: cst.BaseExpression) -> None:
        """Refuse a loader whose batches cannot be divided among any ranks."""
        if self._tree.text(size) == "None":
            raise self._work.job.refuse(
                call,
                "the training loader has batch_size=None, so its dataset makes the "
                "batches, which cannot be divided among ranks. Let the dataset give "
                "samples, and the loader make batches",
            )
        if self._tree.text(size) == "1" and not self._work.choices.per_rank_batch:
            raise self._work.job.refuse(
                call,
                "the training loader takes one sample in each step, which cannot be "
                "divided among ranks. Give it a larger batch_size, or convert with "
                "--per-rank, so that each rank takes one",
            )

    def _can_hoist(self, origin: Origin) -> bool:
        """Return whether a dataset made within the call can be made before it."""
        return (
            isinstance(origin.statement, cst.SimpleStatementLine)
            and origin.path is not None
            and origin.path.isidentifier()
            and isinstance(self._tree.parent(origin.value), cst.Assign)
        )

    def _hoist(self, origin: Origin, data: cst.BaseExpression) -> str:
        path = origin.path or "data"
        name = path.replace("dataloader", "loader").replace("loader", "dataset")
        name = name if "loader" in path else f"{path}_set"
        while name in self._tree.names:
            name += "_"
        # A copy, because the loader's own argument becomes the new name.
        line = cst.SimpleStatementLine(
            body=[
                cst.Assign(
                    targets=[cst.AssignTarget(target=cst.Name(name))],
                    value=data.deep_clone(),
                )
            ]
        )
        made: cst.CSTNode = line
        if any(may_download(self._work, call) for call in found(data, cst.Call)):
            made = self._work.block("with rank0_first()", line)
        self._work.hoisted.append(data)
        self._work.change(data, lambda _: cst.Name(name))
        self._work.nodes_before(origin.statement, [made])
        return name

    def _rewrite(self, call: cst.Call, data: str) -> None:
        """Make ``batch_size`` this rank's, and replace ``shuffle`` by a sampler."""
        work = self._work
        shuffle = argument(call, 2, "shuffle")
        drop = argument(call, 8, "drop_last")
        as_shuffle = self._as_shuffle(call)
        shuffled = "False" if shuffle is None else self._tree.text(shuffle)
        if as_shuffle is not None:
            shuffled, shuffle = as_shuffle, argument(call, -1, "sampler")
        ranks = ", num_replicas=WORLD_SIZE, rank=RANK" if work.horovod else ""
        kept = "" if drop is None else f", drop_last={theirs(self._tree.text(drop))}"
        shown = f"{ranks}, shuffle={theirs(shuffled)}{kept}"
        sampler = work.expression(f"DistributedSampler({theirs(data)}{shown})")
        size = argument(call, 1, "batch_size")
        if size is None:
            raise work.job.refuse(
                call,
                "the training loader has no batch_size, so each step takes one "
                "sample, which cannot be divided among ranks. Give it a batch_size",
            )
        self._check_size(call, size)
        self.batch_sizes.append(size)
        if not work.choices.per_rank_batch:
            work.call_around(size, "per_rank")
        sampler_argument = cst.Arg(
            keyword=cst.Name("sampler"),
            value=sampler,
            equal=cst.AssignEqual(
                whitespace_before=cst.SimpleWhitespace(""),
                whitespace_after=cst.SimpleWhitespace(""),
            ),
        )
        if shuffle is None:
            work.change(call, lambda new: appended(new, sampler_argument))
        else:
            old = next(a for a in call.args if a.value is shuffle)
            work.change(
                old,
                lambda new: sampler_argument.with_changes(
                    comma=new.comma, whitespace_after_arg=new.whitespace_after_arg
                ),
            )
        work.done(
            call,
            f"the loader over `{data}` gives each rank its samples; "
            + (
                f"each rank takes batches of {self._tree.text(size)}, so all together "
                "take more than one process did"
                if work.choices.per_rank_batch
                else f"{self._tree.text(size)} stays the batch of all ranks together"
            ),
        )

    # Epochs

    def _set_epoch(self, loop: BatchLoop) -> None:
        done: set[tuple[int, str]] = set()
        for node, scope in loop.loaders:
            at = self._epoch_begins(loop, node)
            name = self._tree.text(node)
            again = at is not loop.node and self._tree.within(at, loop.node)
            epoch = None if again else self._epoch(at, scope)
            if isinstance(node, cst.Call) or (
                epoch is None and self._is_per_pass(loop)
            ):
                self._set_epoch_of_new(node, at, epoch)
                continue
            if (id(at), name) in done:
                continue  # a condition chooses between parts of one loader
            done.add((id(at), name))
            shown = epoch or f"{name}.sampler.epoch + 1"
            line = theirs(f"{name}.sampler.set_epoch({shown})")
            if self._evaluated[loop.node] - self._ids:
                # Only the loader of a pass that trains is divided.
                trains = theirs(_passes.condition(self._work, loop) or "True")
                line = f"if {trains}:\n    {line}"
            self._work.before(at, line)
            self._work.done(
                at,
                f"the epoch is set on the sampler of `{name}` ({shown})",
            )

    def _set_epoch_of_new(
        self, node: cst.BaseExpression, at: cst.CSTNode, epoch: str | None
    ) -> None:
        """Set the epoch on the sampler of a loader that each pass creates."""
        name = self._tree.text(node)
        new = self._work.expression("with_epoch")
        given = [] if epoch is None else [cst.Arg(value=cst.Name(epoch))]
        if isinstance(node, cst.Call):
            self._work.change(
                node,
                lambda made: cst.Call(func=new, args=[_first(made, given), *given]),
            )
        else:
            shown = "" if epoch is None else f", {epoch}"
            self._work.before(at, f"with_epoch({theirs(name + shown)})")
        self._work.done(
            node,
            f"`{name[:50]}` is created for each pass: its sampler gets the epoch ("
            + (epoch or "counted from 0")
            + ")",
        )

    def _is_per_pass(self, loop: BatchLoop) -> bool:
        """Return whether each pass may recreate its loader, so epochs do not count."""
        return any(self._repeated(o.statement, set()) for o in loop.origins)

    def _repeated(self, node: cst.CSTNode, seen: set[int]) -> bool:
        if self._tree.loops(node):
            return True
        scope = self._tree.function(node)
        if scope is None or id(scope) in seen:
            return False
        seen.add(id(scope))
        return any(self._repeated(c, seen) for c in self._flow.calls_of(scope))

    def _epoch_begins(self, loop: BatchLoop, node: cst.BaseExpression) -> cst.CSTNode:
        """Return the statement that begins to take batches from a loader."""
        if self._tree.within(node, loop.node):
            if isinstance(loop.node, cst.For) and self._tree.within(
                node, loop.node.iter
            ):
                return loop.node
            return self._tree.statement(node)
        statement = self._tree.statement(node)
        above = self._tree.parent(self._tree.parent(node) or node)
        if self._tree.called(above) == "iter":
            return statement
        if self._tree.function(loop.node) is self._tree.function(node) and isinstance(
            loop.node, cst.For
        ):
            # Named before the loop, as `bar = tqdm(loader)`: each pass creates it.
            same = self._tree.loops(statement)[:1] == self._tree.loops(loop.node)[:1]
            return statement if same else loop.node
        return statement

    def _epoch(self, at: cst.CSTNode, scope: Scope) -> str | None:
        for around in self._tree.loops(at):
            if self._tree.function(around) is not scope or not isinstance(
                around, cst.For
            ):
                continue
            target = around.target
            call = around.iter
            if self._tree.called(call) in _PROGRESS and isinstance(target, cst.Name):
                inner = call.args[0].value if isinstance(call, cst.Call) else None
                counts = self._tree.called(call).endswith("range") or (
                    self._tree.called(inner) == "range"
                )
                if counts and target.value != "_":
                    return target.value
        if scope is not None and "epoch" in parameters(scope):
            return "epoch"
        return None


def _first(value: cst.BaseExpression, more: list[cst.Arg]) -> cst.Arg:
    """Return a first argument, with a comma if more follow."""
    if not more:
        return cst.Arg(value=value)
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return cst.Arg(value=value, comma=comma)
