"""Options that are true or false.

Everything has a truth value in Python, that of the text ``"no"`` included: an option
that took any value would do the opposite of what some programs ask for.
"""

from __future__ import annotations

from operator import index

from stretto.errors import SpecError


def bool_option(name: str, value: object) -> bool:
    """Return an option's value: a bool, 0, 1, or one of these as NumPy or torch has it.

    Raises:
        SpecError: it is anything else.
    """
    if isinstance(value, bool):
        return value
    try:
        # NumPy's bool has no index, and its item is Python's.
        item = getattr(value, "item", None)
        found = index(value if item is None else item())  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # torch's with several elements
        found = -1
    if found not in (0, 1):
        raise SpecError(f"{name} must be True or False, got {value!r}")
    return bool(found)
