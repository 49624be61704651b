"""What the tests' outcomes mean: the table, and what was not expected."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

Found = dict[str, dict[str, list[str]]]
"""Test, form: ``[what came of it, why]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known not to pass with DDP itself, and therefore with no form."""

    not_passing: dict[str, tuple[str, str]]
    """Test: ``skipped`` or ``failed``, and the reason."""

    fails: dict[str, dict[str, str]]
    """By form, tests that a plan fails by what it is, and the reason."""

    one_bucket: dict[str, str]
    """Tests that forms with plans run with plans of one bucket, and the reason."""


def load(path: Path) -> Known:
    """The committed list of reasons."""
    found = json.loads(path.read_text())
    return Known(
        not_passing={
            name: (what, reason)
            for what in ("skipped", "failed")
            for name, reason in found[what].items()
        },
        fails=found["fails"],
        one_bucket=found["one_bucket"],
    )


def table(found: Found, known: Known, *, verbose: bool) -> str:
    """Counts per form, then each test that did not pass, with its reason."""
    forms = list(next(iter(found.values()), {}))
    lines = [f"{'':10}{'passed':>8}{'skipped':>9}{'failed':>8}"]
    for form in forms:
        counts = Counter(row[form][0] for row in found.values())
        lines.append(
            f"{form:10}{counts['passed']:>8}{counts['skipped']:>9}{counts['failed']:>8}"
        )
    lines.append("")
    for name, row in found.items():
        if all(what == "passed" for what, _ in row.values()):
            continue
        reason = known.not_passing.get(name, ("", "no reason is known"))[1]
        for reasons in known.fails.values():
            reason = reasons.get(name, reason)
        whats = [row[form][0] for form in forms]
        what = ", ".join(f"{f} {w}" for f, w in zip(forms, whats, strict=True))
        if len(set(whats)) == 1:
            what = whats[0]
        lines.append(f"{name}\n    {what}: {reason}")
        if verbose:
            lines += [f"--- {form}\n{row[form][1]}" for form in forms]
    if known.one_bucket:
        lines.append("\nplanned with one bucket in one slice:")
    lines += [f"{n}\n    {why}" for n, why in known.one_bucket.items() if n in found]
    return "\n".join(lines)


def surprises(found: Found, known: Known, every: Collection[str]) -> list[str]:
    """One line for each outcome that is not the known one; empty when all are.

    Also for each listed test that is not in ``every``, PyTorch's tests, if these are
    given.
    """
    lines = []
    for name, row in found.items():
        what, _ = known.not_passing.get(name, ("passed", ""))
        for form, (got, why) in row.items():
            expected = "failed" if name in known.fails.get(form, {}) else what
            if got != expected:
                last = (why.strip().splitlines() or ["no message"])[-1]
                lines.append(f"{name}: {form} {got}, expected: {expected}. {last}")
    if every:
        listed = {*known.not_passing, *known.one_bucket}
        listed.update(*known.fails.values())
        lines += [
            f"{name}: in known.json, but PyTorch has no such test"
            for name in sorted(listed - set(every))
        ]
    return lines
