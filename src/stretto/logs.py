"""Loggers whose failures never end a training.

A program may install filters, record factories or logger classes that raise. Its own
log lines then raise where it expects them; stretto's would raise within a backward, and
on one rank only.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, final


@final
class LastResort(logging.Handler):
    """Prints warnings and results as `logging.lastResort` does, with stretto's name.

    Active only if the program has set up no logging.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line if the program has set up no logging."""
        logger = logging.getLogger("stretto")
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        try:
            sys.stderr.write(f"stretto: {self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)


if not logging.getLogger("stretto").handlers:
    logging.getLogger("stretto").addHandler(LastResort(logging.INFO))


@final
class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Writes a line to stderr if the program's logging raises."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line as `logging.Logger.log` does."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - whatever the program installed
            _write(msg, args, exc)

    def show(self, line: str) -> None:
        """Log a result; also show it to a program that has set up no logging."""
        logger = self.logger
        if logger.isEnabledFor(logging.INFO) or logging.getLogger().handlers:
            self.info("%s", line)
            return
        try:  # such a program's loggers pass on warnings alone
            logger.handle(
                logger.makeRecord(
                    logger.name, logging.INFO, __file__, 0, line, (), None
                )
            )
        except Exception as exc:  # noqa: BLE001 - as above
            _write("%s", (line,), exc)


def get_logger(name: str) -> SafeLogger:
    """Return the logger of a module."""
    return SafeLogger(logging.getLogger(name))


_announced: set[str] = set()


def warn_experimental(logger: SafeLogger, what: str) -> None:
    """Log once in this process that something has run on one GPU only."""
    if what not in _announced:
        _announced.add(what)
        logger.warning("%s: experimental, run on one GPU only so far", what)


def _write(msg: object, args: tuple[object, ...], exc: Exception) -> None:
    try:
        line = str(msg) % args if args else str(msg)
        sys.stderr.write(f"stretto: {line} (logging raised {exc!r})\n")
    except Exception:  # noqa: BLE001 - stderr is closed
        pass
