"""Horovod's API over stretto: `import stretto.horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod 0.28.1, its last release.

- `torch`: the API for PyTorch; `exceptions`: its errors.
- `runner`: `horovod.run`; `environment`: a rank's place and settings (for `torch`).
- `timeline`: the file of `start_timeline` (for `torch`).
"""

from stretto.horovod.runner import run

__all__ = ["run"]
