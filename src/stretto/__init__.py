"""stretto: synchronous data-parallel training with communication overlapped."""

from stretto._version import __version__

__all__ = ["__version__"]
