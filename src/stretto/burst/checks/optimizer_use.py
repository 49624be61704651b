"""Check that ranks use their optimizers in the same way.

A learning rate from a rank's own loss, or gradients that one rank forgets to zero,
train another model than one process would. Where no two ranks run the same layer,
comparing copies does not find it. With each forward, ranks compare the options of the
optimizers that took a step since the last one, and what became of gradients.

# Note [What becomes of gradients]
At each backward, the gradients of the one before were kept or zeroed; at each step they
are used or dropped. Programs may treat layers differently: a GAN zeroes the gradients
of one network at a time, others drop those of the last layer in the first epoch. So
ranks are compared by optimizer, only where a rank did one thing with all of its
gradients, and dropping them is accepted if the rank never used any before. A rank that
kept its own gradients also reports whether the program zeroed some of other ranks: it
has none of those, but their parameters are guarded, and notice who asks for one.
"""

from __future__ import annotations

import itertools
import json
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, final

from stretto.burst.checks.numbers import as_float, as_int, number_of_words
from stretto.burst.checks.optimizer_options import (
    TOLERANCE,
    OptionDigest,
    as_json,
    is_near,
    logarithm,
    options_of,
    plain,
)
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from stretto.runtime.agreement import Ranks

_MAX_OPTIMIZERS = 3
"""Number of optimizers whose gradients are compared."""

_BACKWARDS = 9
"""Number of backward passes before a step whose gradients are compared."""

_YES, _NO = 1, 2
"""Gradients were kept or used; they were zeroed or dropped. Both: some of them."""

_BITS = 2 * _BACKWARDS + 2


@final
class _Use:
    """One optimizer, and what became of its gradients since its last step."""

    def __init__(self) -> None:
        self.shape: Any = None
        self.groups: list[tuple[tuple[int, ...], int]] = []
        """Positions of each group's parameters in the model, and the group's own."""
        self.held: frozenset[int] = frozenset()
        """The ids of these parameters."""
        self.name = ""
        self.kind = ""
        self.start()

    def start(self) -> None:
        """Begin to record what happens until the next step."""
        self.stepped: Optimizer | None = None
        """The optimizer after a step, kept until its options are compared."""
        self.steps = 0
        self.is_in_step = False
        self.at_backward: list[int] = []
        self.at_step = 0

    def find(self, optimizer: Optimizer, positions: Mapping[int, int]) -> None:
        """Find the model's parameters in the groups, if these have changed."""
        groups = optimizer.param_groups
        shape = [(len(g["params"]), id(next(iter(g["params"]), None))) for g in groups]
        if shape == self.shape:
            return
        self.shape = shape
        rows = [
            (tuple(positions[id(p)] for p in g["params"] if id(p) in positions), i)
            for i, g in enumerate(groups)
        ]
        self.groups = sorted(row for row in rows if row[0])
        self.held = frozenset(id(p) for g in groups for p in g["params"])
        self.kind = type(optimizer).__name__
        self.name = f"{[row[0] for row in self.groups]}"

    def text(self) -> str:
        """Return the steps since the last forward, for comparison."""
        # A step whose closure calls the model has not ended either, on any rank.
        unended = ", one of which did not end (an error?)" if self.is_in_step else ""
        return f"{self.steps} steps of {self.kind}{unended}"

    def flags(self) -> int:
        """Return what became of the gradients as one number."""
        found = self.at_step
        for number, state in enumerate(self.at_backward):
            found |= state << (2 * number + 2)
        return found


@final
class OptimizerUse:
    """How one rank uses the optimizers of one model.

    ``gather`` returns every rank's text. All ranks call it if their options differ.
    """

    num_values: ClassVar[int] = 6

    def __init__(self, ranks: Ranks, gather: Callable[[str], Sequence[str]]) -> None:
        self._ranks = ranks
        self._gather = gather
        self._uses: weakref.WeakKeyDictionary[Optimizer, _Use]
        self._uses = weakref.WeakKeyDictionary()
        self._digest = OptionDigest()
        self.reset((), bool, is_on=False)

    def reset(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        runs: Callable[[Tensor], bool],
        *,
        is_on: bool,
    ) -> None:
        """Compare the optimizers of these parameters from now on.

        ``runs`` returns whether this rank runs a parameter's layer.
        """
        self._is_on = is_on
        self._positions = {id(p): i for i, (_, p) in enumerate(parameters)}
        self._names = [name for name, _ in parameters]
        self._own = [i for i, (_, p) in enumerate(parameters) if runs(p)]
        self._stepped: list[_Use] = []
        """Uses of the optimizers that took a step before the last exchange."""
        self._accepted: tuple[tuple[int, int, int], ...] = ()
        self._compared: list[Optimizer] = []
        self._steps: list[str] = []
        """The parts of steps that must be equal on all ranks, as text."""
        self._zeroed: set[int] = set()
        """Other ranks' parameters whose gradients the program may have zeroed."""
        self._clips: list[float] = []
        self._clips_compared: list[float] = []
        self._before: dict[tuple[int, int, int], int] = {}
        self.cut_short()

    def cut_short(self) -> None:
        """Forget what happened since the last forward."""
        for use in self._uses.values():
            use.shape = None
            use.start()
        self._clips = []
        self._zeroed.clear()

    # Events on this rank.

    def zeroes(self, parameter: Tensor) -> None:
        """Record that the program may zero a gradient that another rank has."""
        self._zeroed.add(id(parameter))

    def backward_begins(self, kept: Mapping[int, bool]) -> None:
        """Record by parameters' ids whether gradients are still there."""
        for use in self._uses.values():
            if len(use.at_backward) < _BACKWARDS:
                states = (kept[i] for i in kept if i in use.held)
                use.at_backward.append(self._state(use, states))
        self._zeroed.clear()

    def _state(self, use: _Use, are_there: Iterable[bool]) -> int:
        """Return what became of an optimizer's gradients on all ranks."""
        state = _joined(_YES if is_there else _NO for is_there in are_there)
        is_partial = state == _YES and not self._zeroed.isdisjoint(use.held)
        return _YES | _NO if is_partial else state

    def before_step(self, optimizer: Optimizer, used: Iterable[bool]) -> None:
        """Record a step, and whether gradients that arrived are still there."""
        if not self._is_on:
            return
        use = self._uses.setdefault(optimizer, _Use())
        use.find(optimizer, self._positions)
        use.stepped = optimizer
        use.steps += not use.is_in_step  # a step may call its base class's
        use.is_in_step = True
        use.at_step |= self._state(use, used)

    def after_step(self) -> None:
        """Record that an optimizer's step has ended."""
        for use in self._uses.values():
            use.is_in_step = False

    def clips(self, limit: float) -> None:
        """Record that gradients are clipped, by the norm or by value."""
        if self._is_on:
            self._clips.append(float(limit))

    # The exchange between ranks.

    def next_values(self) -> list[int]:
        """Return `num_values` numbers to exchange."""
        clips, self._clips = self._clips, []
        self._clips_compared = clips
        clipped = sum((i + 1) * logarithm(limit) for i, limit in enumerate(clips))
        return [*self._next_steps(), as_int(clipped)]

    def _next_steps(self) -> list[int]:
        self._compared, self._steps = [], []
        rows = [
            (use.name, use, use.stepped)
            for use in self._uses.values()
            if use.stepped is not None
        ]
        if not rows or not self._is_on:
            return [0] * (self.num_values - 1)
        rows.sort(key=lambda row: row[0])
        self._compared = [optimizer for _, _, optimizer in rows]
        options = [
            value
            for _, use, optimizer in rows
            for _, _, value in options_of(optimizer, [row[1] for row in use.groups])
        ]
        words, total = self._digest.of(options)
        flags = 0
        for number, (_, use, _) in enumerate(rows[:_MAX_OPTIMIZERS]):
            flags |= use.flags() << (_BITS * number)
        self._stepped = [use for _, use, _ in rows]
        self._steps = [use.text() for _, use, _ in rows]
        for _, use, _ in rows:
            use.start()
        names = number_of_words(row[0] for row in rows) | 1
        return [names, words, as_int(total), flags, number_of_words(self._steps)]

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged, the same on all ranks.

        Raises:
            RankDisagreement: on every rank, naming what differs.
        """
        self._require_same_clips([as_float(row[5]) for row in rows])
        self._require_no_other(tuple((row[0], row[1], row[2]) for row in rows))
        for names in sorted({row[0] for row in rows if row[0]}):
            members = [rank for rank, row in enumerate(rows) if row[0] == names]
            first = rows[members[0]]
            for rank in members[1:]:
                if rows[rank][4] != first[4]:
                    raise self._other_steps(members[0], rank)
                apart = abs(as_float(rows[rank][2]) - as_float(first[2]))
                if rows[rank][1] != first[1] or not apart <= TOLERANCE:
                    raise self._other_options(members[0], rank)
            flags = {rank: rows[rank][3] for rank in members}
            for number in range(_MAX_OPTIMIZERS):
                self._require_same_use(names, number, flags)
        self._compared = []

    def _require_no_other(self, found: tuple[tuple[int, int, int], ...]) -> None:
        """Require that ranks with other parameter groups train in the same way.

        A rank's optimizers must hold what those of other ranks do, of the layers that
        it runs: it alone would train them. What several ranks hold must have the same
        options, in whatever groups.

        Args:
            found: Each rank's names of optimizers, and a digest of their options.
        """
        names = [row[0] for row in found]
        if len({name for name in names if name}) < 2 or found == self._accepted:
            return
        mine = json.dumps({"held": self._by_parameter(), "own": self._own})
        texts = [json.loads(text) for text in self._gather(mine)]
        stepping = {rank: text for rank, text in enumerate(texts) if names[rank]}
        for rank, text in stepping.items():
            own = {str(i) for i in text["own"]}.difference(text["held"])
            for other, known in stepping.items():
                missing = own.intersection(known["held"])
                if missing:
                    name = self._ranks.name
                    first = self._names[min(map(int, missing))]
                    raise RankDisagreement(
                        f"the optimizers that took a step on {name(rank)} lack "
                        f"parameter {first!r}, which those on "
                        f"{name(other)} hold: pass the same parameters to optimizers "
                        "on all ranks, also those whose .grad is None on this rank"
                    )
        self._require_same_held({r: text["held"] for r, text in stepping.items()})
        self._accepted = found

    def _by_parameter(self) -> dict[str, list[list[Any]]]:
        """Return what is done with each parameter, by its position in the model."""
        found: dict[str, list[list[Any]]] = {}
        uses = zip(self._stepped, self._compared, self._steps, strict=False)
        for use, optimizer, steps in uses:
            for positions, group in use.groups:
                rows = [["steps", steps]]
                rows += [
                    [f"{key!r} of {use.kind}", as_json(value)]
                    for _, key, value in options_of(optimizer, [group])
                ]
                for position in positions:
                    found.setdefault(str(position), []).extend(rows)
        return found

    def _require_same_held(self, held: Mapping[int, Mapping[str, Any]]) -> None:
        first: dict[str, tuple[int, Any]] = {}
        for rank, by_parameter in held.items():
            for position, rows in by_parameter.items():
                other, known = first.setdefault(position, (rank, rows))
                for a, b in itertools.zip_longest(known, rows):
                    if is_near(a, b):
                        continue
                    name = self._ranks.name
                    one, two = (f"{row[0]} {row[1]}" if row else "-" for row in (a, b))
                    raise _options_differ(
                        f"for parameter {self._names[int(position)]!r}, {one} on "
                        f"{name(other)} and {two} on {name(rank)}"
                    )

    def _require_same_clips(self, sums: Sequence[float]) -> None:
        """Require that ranks which clip gradients clip to the same."""
        members = [rank for rank, found in enumerate(sums) if found]
        for rank in members[1:]:
            if abs(sums[rank] - sums[members[0]]) <= TOLERANCE * abs(sums[rank]):
                continue
            texts = self._gather(json.dumps(self._clips_compared))
            name = self._ranks.name
            raise RankDisagreement(
                f"gradients are clipped to {texts[members[0]]} on {name(members[0])} "
                f"and to {texts[rank]} on {name(rank)}: pass the same values to "
                "clip_grad_norm_ and clip_grad_value_ on every rank"
            )

    def _other_steps(self, one: int, other: int) -> RankDisagreement:
        """Return the error of other optimizers or numbers of steps. Collective."""
        texts = self._gather(", ".join(self._steps))
        name = self._ranks.name
        return RankDisagreement(
            f"{name(one)} took {texts[one]} since the last forward, {name(other)} "
            f"{texts[other]}: use one kind of optimizer and take equally many steps "
            "on every rank"
        )

    def _require_same_use(
        self, names: int, number: int, flags: Mapping[int, int]
    ) -> None:
        mine = {rank: flag >> (_BITS * number) for rank, flag in flags.items()}
        are_same = len(set(mine.values())) == 1
        for backward in range(0 if are_same else _BACKWARDS):
            shift = 2 * backward + 2
            states = {rank: flag >> shift & 3 for rank, flag in mine.items()}
            kept, zeroed = _ranks_of(_YES, states), _ranks_of(_NO, states)
            if kept and zeroed:
                raise RankDisagreement(
                    f"{self._ranks.name_all(zeroed)} zeroed gradients before a "
                    f"backward, {self._ranks.name_all(kept)} did not and has added "
                    "them to the next ones. Call zero_grad() on every rank or on none"
                )
        states = {rank: flag & 3 for rank, flag in mine.items()}
        used, dropped = _ranks_of(_YES, states), _ranks_of(_NO, states)
        changed = [r for r in dropped if self._before.get((names, number, r)) == _YES]
        if used and changed:
            raise RankDisagreement(
                f"{self._ranks.name_all(changed)} dropped all gradients before an "
                f"optimizer step, {self._ranks.name_all(used)} did not. Decide it from "
                "values that are the same on all ranks, such as model.grad_norm(); to "
                "freeze layers, set their parameters' requires_grad on every rank"
            )
        for rank, state in states.items():
            if state:
                self._before[names, number, rank] = state

    def _other_options(self, one: int, other: int) -> RankDisagreement:
        """Return the error that names an option and its values. Collective."""
        mine = [
            [
                f"{key!r} of {type(optimizer).__name__}'s parameter group {i}",
                repr(plain(v)),
            ]
            for optimizer in self._compared
            for i, key, v in options_of(optimizer, range(len(optimizer.param_groups)))
        ]
        texts = [json.loads(text) for text in self._gather(json.dumps(mine))]
        name = self._ranks.name
        found = next(
            (
                f"{a[0]} is {a[1]} on {name(one)} and {b[1]} on {name(other)}"
                for a, b in zip(texts[one], texts[other], strict=False)
                if a != b
            ),
            f"those of an optimizer differ between {name(one)} and {name(other)}",
        )
        return _options_differ(found)


def _options_differ(found: str) -> RankDisagreement:
    return RankDisagreement(
        f"optimizers' options differ between ranks: {found}. Set them from values "
        "that are the same on all ranks: add the ranks' losses with "
        "torch.distributed.all_reduce before passing them to a scheduler's step()"
    )


def _joined(states: Iterable[int]) -> int:
    found = 0
    for state in states:
        found |= state
    return found


def _ranks_of(state: int, states: Mapping[int, int]) -> list[int]:
    return [rank for rank, found in states.items() if found == state]
