"""Measured costs of background jobs to foregrounds on a device, and their own rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema import codec, rules

if TYPE_CHECKING:
    from pathlib import Path

FITS, OUTSTANDING = "fits", "outstanding"
POLICIES = (FITS, OUTSTANDING)
"""When tasks may start: in windows that they fit, or at any time."""

_HIGHEST_SHARE = 1.1
_WIDEST_SPREAD = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CollocatedPair:
    """A foreground and a background measured on the same device.

    Each is compared with itself alone, in pairs of blocks of steps.
    """

    foreground: str
    """Name of the foreground, such as its model."""

    background: str

    device: str
    """Kind of device, such as ``cpu``."""

    policy: str
    """``fits``: tasks start in windows that they fit. ``outstanding``: at any time."""

    depth: int
    """Largest number of outstanding tasks."""

    task_s: float
    """Length of a task alone."""

    usable_ratio: float
    """Part of the foreground's step alone that tasks can use: its windows, with
    ``fits`` in whole tasks."""

    loss_ratio: float
    """The foreground's step beside the background over its step alone, less 1."""

    loss_spread_ratio: float
    """Distance between the quartiles of the pairs' losses."""

    share_ratio: float
    """The background's rate beside the foreground over its rate alone."""

    share_spread_ratio: float
    """Distance between the quartiles of the pairs' shares."""

    pairs: int
    """Number of pairs of blocks measured."""

    def __post_init__(self) -> None:
        for name in ("foreground", "background", "device"):
            rules.one_line(f".{name}", getattr(self, name))
        rules.one_of(".policy", self.policy, POLICIES)
        rules.at_least(".depth", self.depth, 1)
        for name in ("task_s", "usable_ratio"):
            rules.finite(f".{name}", getattr(self, name), above=0.0)
        if self.usable_ratio > 1.0:
            raise SpecError(
                f"usable_ratio must be <= 1, got {self.usable_ratio:g}",
                place=".usable_ratio",
            )
        rules.finite(".loss_ratio", self.loss_ratio, above=-1.0)
        for name in ("loss_spread_ratio", "share_ratio", "share_spread_ratio"):
            rules.finite(f".{name}", getattr(self, name))
        rules.at_least(".pairs", self.pairs, 1)

    @property
    def use_ratio(self) -> float:
        """The background's rate in usable time, over its rate alone."""
        return self.share_ratio / self.usable_ratio

    @property
    def doubt(self) -> str | None:
        """Why the measurement cannot be trusted, or None.

        A background cannot be faster beside a foreground than alone, and pairs of
        blocks on a quiet machine agree.
        """
        if self.share_ratio > _HIGHEST_SHARE:
            return (
                f"the background was {self.share_ratio:.2f} times as fast beside the "
                "foreground as alone"
            )
        if self.loss_spread_ratio > _WIDEST_SPREAD:
            return (
                "the quartiles of the foreground's loss are "
                f"{100 * self.loss_spread_ratio:.0f} points apart"
            )
        return None

    @property
    def title(self) -> str:
        """Both jobs and the device in a few words."""
        return f"{self.background} beside {self.foreground} on {self.device}"

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The key by which the pairs of a file are distinguished."""
        return (
            self.foreground,
            self.background,
            self.device,
            self.policy,
            self.depth,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collocation:
    """Measured pairs of jobs; a pair on one kind of device and with one depth once."""

    rows: tuple[CollocatedPair, ...]

    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise SpecError("rows must not be empty", place=".rows")
        for i, row in enumerate(self.rows):
            if any(row.key == other.key for other in self.rows[:i]):
                raise SpecError(
                    f"rows must differ in jobs, device, policy or depth, got "
                    f"{row.title} with {row.policy} and depth {row.depth} again",
                    place=f".rows[{i}]",
                )

    def with_row(self, row: CollocatedPair) -> Collocation:
        """Return a copy with one more row; it replaces an earlier one of its pair."""
        kept = [other for other in self.rows if other.key != row.key]
        return Collocation(rows=(*kept, row), provenance=self.provenance)

    def rows_for(self, foreground: str) -> tuple[CollocatedPair, ...]:
        """Return the rows of a foreground, or all rows if it was not measured."""
        own = tuple(row for row in self.rows if row.foreground == foreground)
        return own or self.rows

    @classmethod
    def load(cls, path: str | Path) -> Collocation:
        """Return the rows in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the rows atomically."""
        codec.save(path, self)
