"""Facts about the ranks' models, for the notes on their differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, final

import libcst as cst

from stretto.convert._edit import Work
from stretto.convert._models import Models
from stretto.convert._rank_sources import RankSources
from stretto.convert._trained_parts import TrainedParts
from stretto.convert._tree import dotted


class RankValues(Protocol):
    """Facts about values of a rank's own samples."""

    def differs(self, node: cst.BaseExpression) -> bool:
        """Return whether a value comes from a rank's own samples, not reduced."""

    def steers(self, node: cst.If | cst.While) -> bool:
        """Return whether a decision may change how often a rank trains."""


def target_of(node: cst.Assign | cst.AugAssign) -> cst.BaseExpression:
    """Return what an assignment changes, the first if it has several targets."""
    return node.target if isinstance(node, cst.AugAssign) else node.targets[0].target


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaNotes:
    """The script, what differs by rank in it, and the notes on that."""

    work: Work
    models: Models
    """The trained models and where they are wrapped."""
    values: RankValues
    sources: RankSources
    parts: TrainedParts
    begins: cst.CSTNode
    """The statement before which ranks begin to draw their own numbers."""
    reported: set[int] = field(default_factory=set)
    """The ``id`` of each node that has a note."""

    def named(self, node: cst.BaseExpression) -> cst.FunctionDef | None:
        """Return the function of the script that an expression names."""
        last = (dotted(node) or "").rpartition(".")[2]
        return next((f for f in self.work.tree.functions if f.name.value == last), None)

    def short(self, node: cst.CSTNode) -> str:
        """Return the beginning of a text, in one line."""
        return " ".join(self.work.tree.text(node).split())[:60]

    def note(self, node: cst.CSTNode, text: str) -> None:
        """List something once."""
        if id(node) not in self.reported:
            self.reported.add(id(node))
            self.work.undecided(node, text)
