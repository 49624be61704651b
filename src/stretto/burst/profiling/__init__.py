"""Measure the layers of a module, from which burst plans are made.

- `collective_profile`: profile on the ranks that train (for programs).
- `layer_profile`: each layer's time by number of samples (for
  `collective_profile` and `_api`).
- `layer_rounds`: the rounds in which they are timed (for `layer_profile`).
- `host_costs`: what messages and copies cost on these ranks (for `collective_profile`).
- `factory`: load a model by its function's name (for `cli`).
"""
