"""Shared parts for Keras 3 on every backend, for `stretto.keras` and Horovod's names.

- `optimizer_class`: gives an optimizer a class that reduces gradients first.
- `model_state`: weights and the optimizer's state to all ranks.
- `epoch_callbacks`: callbacks of ``fit``.
"""
