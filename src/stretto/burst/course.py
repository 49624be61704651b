"""The schedule of one rank's forward for given shares, computed once.

# Note [Layers passed over]
A rank outside a layer's ranks has neither its samples nor its parameters. It does not
run the layer: anything that backward must reach there is passed on to the next layer,
and a tensor is made only where samples arrive again. Moves in which a rank neither
sends nor receives are left out of its schedule. The rest keep their order, which is the
same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.burst.layout import Numbers, Transfer
from stretto.burst.steps import LayerStep

if TYPE_CHECKING:
    from stretto.burst.layout import Layouts
    from stretto.burst.links import Width
    from stretto.burst.steps import Steps


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One layer on one rank."""

    step: LayerStep

    samples: Numbers
    """The rank's samples, in the order of its rows."""

    is_passed: bool
    """Whether the rank is outside the layer's ranks, see Note [Layers passed over]."""

    takes: tuple[tuple[str, int | None], ...]
    """Its inputs: the layer, and the number of its move if this rank takes part."""

    starts: tuple[int, ...]
    """Moves of its output in which this rank takes part."""

    shares: tuple[int, ...]
    """Samples of each of the layer's ranks."""

    is_tied: bool
    """Whether samples moved before it, so that backward must always pass through it:
    other ranks wait for the gradients."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """All layers' turns on one rank."""

    turns: tuple[Turn, ...]

    input_starts: tuple[int, ...]

    output_takes: int | None

    moves: tuple[tuple[int, Transfer, str], ...]
    """Moves in which this rank takes part: number, rows, the layer they come from."""

    num_numbers: int
    """Moves of all ranks, for tags."""


def course_of(steps: Steps, layouts: Layouts, rank: int) -> Course:
    """Return one rank's schedule for these shares."""
    rows: list[tuple[Width | None, tuple[tuple[int, Width | None], ...]]]
    rows = [(None, steps.input_starts)]
    rows += [(step.width, step.starts) for step in steps.layers]
    moves: dict[int, Transfer] = {}
    real = set()
    for source, starts in rows:
        for number, target in starts:
            transfer = layouts.transfer(source, target, rank)
            if transfer is not None:
                real.add(number)
                if not transfer.is_idle:
                    moves[number] = transfer
    turns = []
    moved_before: dict[str, bool] = {}
    for step in steps.layers:
        first, width = step.width
        every = layouts.samples(step.width)
        moved_before[step.node.name] = any(
            number in real or moved_before.get(name, False)
            for name, number in step.takes
        )
        turns.append(
            Turn(
                step=step,
                samples=every[rank],
                is_passed=not first <= rank < first + width,
                takes=tuple(
                    (name, number if number in moves else None)
                    for name, number in step.takes
                ),
                starts=tuple(n for n, _ in step.starts if n in moves),
                shares=tuple(len(some) for some in every[first : first + width]),
                is_tied=moved_before[step.node.name],
            )
        )
    output = steps.output_takes
    return Course(
        turns=tuple(turns),
        input_starts=tuple(n for n, _ in steps.input_starts if n in moves),
        output_takes=output if output in moves else None,
        moves=tuple((n, moves[n], steps.names[n]) for n in sorted(moves)),
        num_numbers=len(steps.names),
    )
