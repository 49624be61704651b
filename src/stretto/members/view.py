"""A membership: which ranks train together, in which order, and who may change that.

# Note [Keepers vote, not ranks]
A keeper votes with the number of its ranks in the present view, whether they still run
or not: it is their parent, so it votes for those that have ended. If ended ranks left
the count instead, a keeper that votes for one view with three ranks and then reports
two of them ended would make room for a second majority without it. Votes that are fixed
by the present view always overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank's process; a process that is started in its place is another member."""

    id: int
    """Unique in the job; never used again."""

    keeper: int
    """The keeper that started it; one per host."""

    address: str = ""
    """``host:port`` of the store that it can serve; empty until it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The members from one change to the next."""

    generation: int
    """Counts changes. View 0 is what the launcher starts; no rank trains in it."""

    members: tuple[Member, ...]
    """By rank. The first one serves the store."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The members' ids, by rank."""
        return tuple(member.id for member in self.members)

    @property
    def keepers(self) -> tuple[int, ...]:
        """The keepers of the members, in the order of their first ranks."""
        return tuple(dict.fromkeys(member.keeper for member in self.members))

    def keeps(self, earlier: View | None) -> bool:
        """Return whether all members of an earlier view are in this one.

        Then what they have begun together can end. ``None``: there is no earlier view.
        """
        return earlier is not None and set(earlier.ids) <= set(self.ids)

    def rank(self, member: int) -> int | None:
        """Return a member's rank, or ``None`` if it is not in this view."""
        return self.ids.index(member) if member in self.ids else None

    def is_majority(self, keepers: Collection[int]) -> bool:
        """Return whether these keepers may decide the next view.

        They have more than half of the votes, or half of them with that of rank 0.
        """
        votes = sum(member.keeper in keepers for member in self.members)
        if 2 * votes == len(self.members):
            return bool(self.members) and self.members[0].keeper in keepers
        return 2 * votes > len(self.members)


def why_over(
    view: View, newest: View | None, error: BaseException, *, has_ended: bool
) -> str:
    """Return why ranks can't train in a view, in one line.

    Args:
        view: in which they can't.
        newest: the newest view that is known.
        error: what this rank has met.
        has_ended: whether the view's connections were ended on purpose, so that the
            error says nothing about the cause.
    """
    if newest is None or newest.generation <= view.generation:
        if has_ended:
            return "another rank has left it, or can't reach a member"
        return (str(error) or type(error).__name__).splitlines()[0]
    gone = [member for member in view.ids if newest.rank(member) is None]
    if not gone:
        return f"membership {newest.generation} follows it with more members"
    names = ", ".join(map(str, gone))
    what = "members" if len(gone) > 1 else "member"
    return f"membership {newest.generation} follows it without {what} {names}"
