"""Horovod's API over stretto: `import stretto.horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod 0.28.1, its last release.

- `torch`: the API for PyTorch.
- `exceptions`: its errors (shared, for instance by `torch.elastic` and `world`).
- `tensorflow`: the API for TensorFlow 2.
- `keras`: Horovod's other name for its part for Keras.
- `keras3`: what Keras 3 needs on every backend.
- `numpy_arrays`: operations on NumPy arrays, for both (shared, for instance by
  `tensorflow.operations` and `keras3.epoch_callbacks`).
- `runner`: `horovod.run` (for programs).
- `environment`: a rank's place and settings (for `torch.regrouping` and `world`).
- `world`: init, ranks and sets for every framework (shared, for instance by
  `torch.elastic` and `tensorflow.operations`).
- `meeting`: find the ranks (for `world`).
- `attempts`: which attempt to meet they make together (for `meeting`).
- `topology`: the ranks of a host (for `world`).
- `process_sets`: sets of ranks that run collectives among themselves (shared, for
  instance by `tensorflow.operations` and `torch.allreduce`).
- `timeline`: the timeline file (shared, for instance by `world` and
  `torch.gradients`).
- `reduce_ops`: reductions of ranks' values (shared, for instance by
  `tensorflow.operations` and `torch.reducescatter`).
"""

from stretto.horovod.runner import run

__all__ = ["run"]
