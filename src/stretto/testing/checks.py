"""Checks of a contract as values, for `pytest.mark.parametrize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One fact that an implementation must satisfy; calling it verifies the fact."""

    name: str

    run: Callable[[], None]

    def __call__(self) -> None:
        """Verify the fact.

        Raises:
            AssertionError: it does not hold.
        """
        self.run()

    def __str__(self) -> str:
        return self.name
