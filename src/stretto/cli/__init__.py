"""The command line: one module per command, imported when the command is called."""

from stretto.cli._main import main

__all__ = ["main"]
