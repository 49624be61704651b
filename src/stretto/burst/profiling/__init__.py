"""Measure the layers of a module, from which burst plans are made.

- `collective_profile`: profile on the ranks that train.
- `layer_profile`: each layer's time by number of samples (for one rank, and above).
- `layer_rounds`: the rounds in which they are timed (for `layer_profile`).
- `host_costs`: what messages and copies cost on these ranks (for `collective_profile`).
- `factory`: load a model by its function's name (for the command line).
"""
