"""Choices for a conversion, and its result."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass, field

from stretto.boolean_options import bool_option


class Target(enum.Enum):
    """The library that the converted script trains with."""

    DDP = "ddp"
    STRETTO = "stretto"
    HOROVOD = "horovod"


class Evaluation(enum.Enum):
    """Which ranks evaluate."""

    ALL = "all"
    RANK0 = "rank0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The user's choices."""

    target: Target = Target.STRETTO
    evaluation: Evaluation = Evaluation.ALL
    per_rank_batch: bool = False
    """Whether a loader's batch size becomes each rank's instead of all ranks'."""

    def __post_init__(self) -> None:
        value = bool_option("per_rank_batch", self.per_rank_batch)
        object.__setattr__(self, "per_rank_batch", value)


class Kind(enum.Enum):
    """The subject of a note."""

    DONE = "done"
    OPEN = "could not decide"
    KNOW = "to know"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Note:
    """One line of the list that comes with a diff."""

    line: int
    """Line of the script before the conversion, from 1; 0 for no line."""
    text: str
    kind: Kind = field(compare=False)
    cell: int | None = field(default=None, compare=False)
    """The notebook's cell in which ``line`` counts, from 1."""

    def __str__(self) -> str:
        place = f"cell {self.cell}, " if self.cell is not None else ""
        return f"{place}line {self.line}: {self.text}" if self.line else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A script before and after, and the list of changes."""

    name: str
    before: str
    after: str
    notes: tuple[Note, ...]

    @property
    def changes(self) -> bool:
        """Return whether anything differs."""
        return self.before != self.after

    def diff(self) -> str:
        """Return the unified diff; empty if nothing changes."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"a/{self.name}",
            f"b/{self.name}",
        )
        return "".join(
            x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n"
            for x in lines
        )

    def listed(self) -> str:
        """Return the notes as text, grouped by what they are about."""
        parts = []
        for kind in Kind:
            of_kind = [n for n in self.notes if n.kind is kind]
            if of_kind:
                lines = "\n".join(f"  {note}" for note in of_kind)
                parts.append(f"{kind.value}:\n{lines}")
        return "\n".join(parts)
