"""Shared parts for Keras 3 on every backend, for `stretto.keras` and Horovod's names.

- `optimizer_class`: gives an optimizer a class that reduces gradients first (for
  `epoch_callbacks`, `tensorflow.optimizer` and `keras.optimizer`).
- `model_state`: weights and the optimizer's state to all ranks (for `epoch_callbacks`
  and `keras.models`).
- `epoch_callbacks`: callbacks of ``fit`` (for `tensorflow.keras.callbacks`, and
  programs).
"""
