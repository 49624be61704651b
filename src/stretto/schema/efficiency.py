"""Number of samples that training needs to reach its target, by batch."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import SpecError
from stretto.schema import codec, rules


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamples:
    """Samples that training with one batch needs."""

    batch: int

    samples: float
    """Samples until the target is reached."""

    def __post_init__(self) -> None:
        rules.at_least(".batch", self.batch, 1)
        rules.finite(".samples", self.samples, above=0.0)


@dataclass(frozen=True, kw_only=True)
class SampleEfficiency:
    """A measured curve, or a critical batch; one of the two."""

    name: str

    points: tuple[BatchSamples, ...] = ()
    """By ascending batch."""

    critical_batch: float | None = None
    r"""$B_c$ of the form $E(B) = E_{min} (1 + B / B_c)$."""

    min_samples: float = 1.0
    r"""$E_{min}$; only ratios matter for speed-ups."""

    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules.not_empty(".name", self.name)
        rules.finite(".min_samples", self.min_samples, above=0.0)
        if (self.critical_batch is None) == (not self.points):
            raise SpecError(
                "a curve is either points or a critical_batch, got "
                f"{'both' if self.points else 'neither'}",
                place=".points",
            )
        if self.critical_batch is not None:
            rules.finite(".critical_batch", self.critical_batch, above=0.0)
        for i, point in enumerate(self.points):
            if i and point.batch <= self.points[i - 1].batch:
                raise SpecError(
                    f"batches must ascend, got {point.batch} after "
                    f"{self.points[i - 1].batch}",
                    place=f".points[{i}].batch",
                )

    def samples_to_target(self, batch: int) -> float | None:
        r"""Return the samples with a batch; ``None`` outside the measured range.

        Between two measured batches $\log$ samples is linear in $\log$ batch. A
        critical batch gives $E_{min} (1 + B / B_c)$: below it the batch hardly
        matters, beyond it samples grow with the batch and steps no longer fall.
        Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018,
        section 2.3.
        """
        if self.critical_batch is not None:
            return self.min_samples * (1.0 + batch / self.critical_batch)
        points = self.points
        if not points[0].batch <= batch <= points[-1].batch:
            return None
        at = bisect_left(points, batch, key=lambda point: point.batch)
        high = points[at]
        if high.batch == batch:
            return high.samples
        low = points[at - 1]
        share = math.log(batch / low.batch) / math.log(high.batch / low.batch)
        found: float = low.samples * (high.samples / low.samples) ** share
        return found

    @classmethod
    def load(cls, path: str | Path) -> SampleEfficiency:
        """Return the curve in a file: stretto's, or CSV with a ``batch,samples``
        header.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        if Path(path).suffix.lower() == ".csv":
            return _from_csv(Path(path))
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the curve atomically."""
        codec.save(path, self)


def _from_csv(path: Path) -> SampleEfficiency:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    rows = csv.DictReader(text.splitlines())
    if not {"batch", "samples"} <= set(rows.fieldnames or ()):
        raise SpecError(
            f"{path}: the first line must name the columns batch and samples, got "
            f"{', '.join(rows.fieldnames or ()) or 'nothing'}",
            place="line 1",
        )
    for name in ("batch", "samples"):
        if list(rows.fieldnames or ()).count(name) > 1:
            raise SpecError(
                f"{path}: line 1: column {name!r} is a duplicate", place="line 1"
            )
    points = []
    for row in rows:
        if None in row:  # cells without a column
            raise SpecError(
                f"{path}: line {rows.line_num}: has more cells than the first line "
                "has columns",
                place=f"line {rows.line_num}",
            )
        try:
            points.append(
                BatchSamples(batch=int(row["batch"]), samples=float(row["samples"]))
            )
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"{path}: line {rows.line_num}: must be a batch and samples, got "
                f"{row['batch']!r} and {row['samples']!r} ({error})",
                place=f"line {rows.line_num}",
            ) from error
    if not points:
        raise SpecError(
            f"{path}: has no rows after the first line: give a batch and its samples "
            "in each line",
            place="line 2",
        )
    points.sort(key=lambda point: point.batch)
    try:
        return SampleEfficiency(name=path.stem, points=tuple(points))
    except SpecError as error:
        raise SpecError(f"{path}: {error}", place=error.place) from None
