"""Errors of programs that commands run in their own process."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.main_module import show_error

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def program_errors() -> Iterator[None]:
    """Show an error of the user's program as plain Python does, and exit with 1.

    Raises:
        StrettoError: the program, or stretto, raised it; it is shown in one line.
    """
    try:
        yield
    except StrettoError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the program raised
        show_error(error)
        sys.exit(1)
