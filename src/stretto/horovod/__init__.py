"""Horovod's API over stretto: `import stretto.horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod 0.28.1, its last release.

- `torch`: the API for PyTorch; `exceptions`: its errors.
- `runner`: `horovod.run`; `environment`: a rank's place and settings.
- `world`: init, ranks and sets for every framework, with `meeting` (find the ranks),
  `topology` (those of a host), `process_sets`, and `timeline` (its file).
- `reduce_ops`: reductions of ranks' values.
"""

from stretto.horovod.runner import run

__all__ = ["run"]
