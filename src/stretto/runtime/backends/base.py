"""Values that every backend of lanes shares."""

from __future__ import annotations

Need = tuple[int, int | None]
"""A lane and the resource that a collective on it may use."""
