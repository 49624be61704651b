"""What a model with an optimizer that reduces nothing logs among several ranks."""

from __future__ import annotations

import importlib.util
import logging

import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


def begun(monkeypatch, caplog, own_step: bool) -> str:
    """The log of the beginning of ``fit`` on one of two ranks."""
    import keras

    from stretto.horovod.keras3 import epoch_callbacks

    class Own(keras.Model):
        pass

    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile_from_config(
        {"optimizer": keras.optimizers.serialize(keras.optimizers.SGD()), "loss": "mse"}
    )
    if own_step:
        model = Own(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    monkeypatch.setattr(epoch_callbacks.world, "size", lambda: 2)
    monkeypatch.setattr(epoch_callbacks, "broadcast_state", lambda *_: None)
    callback = epoch_callbacks.BroadcastInitialState()
    callback.set_model(model)
    with caplog.at_level(logging.WARNING, logger="stretto"):
        callback.on_train_begin()
    return caplog.text


def test_a_plain_optimizer_of_a_configuration_is_named(monkeypatch, caplog):
    text = begun(monkeypatch, caplog, own_step=False)
    assert "SGD, does not reduce gradients" in text


def test_a_model_of_another_class_may_reduce_in_its_own_step(monkeypatch, caplog):
    assert "does not reduce" not in begun(monkeypatch, caplog, own_step=True)
