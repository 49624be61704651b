"""Horovod's API over stretto: `import stretto.horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod 0.28.1, its last release.

- `torch`: the API for PyTorch; `exceptions`: its errors.
- `tensorflow`: the API for TensorFlow 2; `keras`: Horovod's other name for its part for
  Keras; `keras3`: what Keras 3 needs on every backend; `numpy_arrays`: operations for
  both.
- `runner`: `horovod.run`; `environment`: a rank's place and settings.
- `world`: init, ranks and sets for every framework, with `meeting` and
  `attempts` (find the ranks), `topology` (those of a host), `process_sets`, and
  `timeline` (its file).
- `reduce_ops`: reductions of ranks' values.
"""

from stretto.horovod.runner import run

__all__ = ["run"]
