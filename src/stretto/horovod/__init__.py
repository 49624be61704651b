"""Horovod's API over stretto: `import stretto.horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod 0.28.1, its last release.
"""

from stretto.horovod.runner import run

__all__ = ["run"]
