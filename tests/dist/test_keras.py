"""`stretto.keras` on ranks: all programs of a backend run in one group of processes."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.ranks import RankServers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

STEPS = 20
SAMPLES = 24
WIDTH = 6

BACKENDS = ("tensorflow", "jax", "torch")

if importlib.util.find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)


# What runs on ranks.


def data(model: str) -> tuple[Any, Any]:
    chance = np.random.default_rng(0)
    targets = chance.normal(size=(SAMPLES, 1)).astype("f4")
    if model in ("embedding", "lstm"):
        return chance.integers(0, 11, size=(SAMPLES, 5)), targets
    if model == "conv":
        return chance.normal(size=(SAMPLES, WIDTH, WIDTH, 1)).astype("f4"), targets
    return chance.normal(size=(SAMPLES, WIDTH)).astype("f4"), targets


def built(model: str, seed: int) -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(seed)
    inputs = keras.Input(data(model)[0].shape[1:])
    if model == "dense":
        found = layers.Dense(16, activation="tanh")(inputs)
        found = layers.Dense(16, activation="gelu")(found)
    elif model == "conv":
        found = layers.Conv2D(4, 3, activation="tanh")(inputs)
        found = layers.Flatten()(layers.AveragePooling2D(2)(found))
    elif model == "embedding":
        found = layers.Flatten()(layers.Embedding(11, 4)(inputs))
    elif model == "lstm":
        found = layers.LSTM(6)(layers.Embedding(11, 4)(inputs))
    elif model == "shared":
        shared = layers.Dense(WIDTH, activation="tanh")
        found = shared(shared(inputs))
    elif model == "frozen":
        norm = layers.BatchNormalization()
        found = norm(layers.Dense(8)(inputs))
        norm.trainable = False
    else:
        raise ValueError(model)
    return keras.Model(inputs, layers.Dense(1)(found))


MODELS = ("dense", "conv", "embedding", "lstm", "shared", "frozen")


def recorder() -> Any:
    import keras

    class Weights(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            self.steps.append(flat(self.model))

    return Weights()


def flat(model: Any) -> Any:
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


def optimizer_for(model: str) -> Any:
    import keras

    if model in ("dense", "embedding"):
        return keras.optimizers.Adam(0.003)
    if model == "accumulated":
        return keras.optimizers.SGD(0.02, gradient_accumulation_steps=2)
    return keras.optimizers.SGD(0.02, momentum=0.9)


def fitted(name: str, part: slice, *, ours: bool, seed: int) -> list[Any]:
    """Each step's weights in ``fit``, one step an epoch."""
    import stretto.keras as sk

    kind = "dense" if name == "accumulated" else name
    model = built(kind, seed)
    optimizer = optimizer_for(name)
    weights = recorder()
    callbacks = [weights]
    if ours:
        optimizer = sk.DistributedOptimizer(optimizer)
        callbacks = [sk.BroadcastInitialState(), weights]
    model.compile(optimizer, "mse")
    x, y = data(kind)
    model.fit(
        x[part],
        y[part],
        batch_size=SAMPLES,
        epochs=STEPS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return weights.steps


def looped(name: str, part: slice, *, ours: bool, seed: int) -> list[Any]:
    """Each step's weights in a loop of the backend's own kind."""
    import keras

    import stretto.keras as sk

    model = built(name, seed)
    optimizer = keras.optimizers.Adam(0.003)
    if ours:
        optimizer = sk.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    if ours:
        sk.broadcast_model(model)
    x, y = (values[part] for values in data(name))
    loss = keras.losses.MeanSquaredError()
    step = STEPPERS[keras.backend.backend()](model, optimizer, loss)
    found = []
    for _ in range(STEPS):
        step(x, y)
        found.append(flat(model))
    return found


def tensorflow_stepper(model: Any, optimizer: Any, loss: Any) -> Callable[..., None]:
    import tensorflow as tf

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    return step


def torch_stepper(model: Any, optimizer: Any, loss: Any) -> Callable[..., None]:
    def step(x: Any, y: Any) -> None:
        model.zero_grad()
        loss(y, model(x, training=True)).backward()
        variables = model.trainable_variables
        optimizer.apply([v.value.grad for v in variables], variables)

    return step


def jax_stepper(model: Any, optimizer: Any, loss: Any) -> Callable[..., None]:
    import jax

    def value(trained: Any, fixed: Any, x: Any, y: Any) -> Any:
        found, _ = model.stateless_call(trained, fixed, x, training=True)
        return loss(y, found)

    @jax.jit
    def compiled(trained: Any, fixed: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(value)(trained, fixed, x, y)
        return optimizer.stateless_apply(state, grads, trained)

    def step(x: Any, y: Any) -> None:
        trained, fixed, state = (
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                optimizer.variables,
            )
        )
        trained, state = compiled(trained, fixed, state, x, y)
        for variable, new in zip(model.trainable_variables, trained, strict=True):
            variable.assign(new)
        for variable, new in zip(optimizer.variables, state, strict=True):
            variable.assign(new)

    return step


STEPPERS = {
    "tensorflow": tensorflow_stepper,
    "jax": jax_stepper,
    "torch": torch_stepper,
}

WAYS = [*((fitted, name) for name in (*MODELS, "accumulated")), (looped, "dense")]


def start(backend: str) -> None:
    os.environ["KERAS_BACKEND"] = backend
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import stretto.keras as sk

    sk.init()


def trained(rank: int, size: int, backend: str, names: list[str]) -> dict[Any, Any]:
    """Each step's weights on the ranks, on rank 0 also those of one process."""
    start(backend)
    import stretto.keras as sk

    rows = sk.shard(SAMPLES)
    part = slice(rows.start, rows.stop)
    found: dict[Any, Any] = {}
    for way, name in WAYS:
        if name not in names:
            continue
        key = f"{way.__name__} {name}"
        found[key] = way(name, part, ours=True, seed=rank + 7)
        if rank == 0:
            found[f"{key} alone"] = way(name, slice(None), ours=False, seed=7)
    sk.shutdown()
    return found


def small(rank: int, size: int, backend: str) -> dict[str, Any]:
    start(backend)
    import stretto.keras as sk

    found: dict[str, Any] = {}
    for program in PROGRAMS.values():
        try:
            found[program.__name__] = program(rank, size)
        except Exception as exc:  # noqa: BLE001
            import traceback

            found[program.__name__] = f"{exc!r}\n{traceback.format_exc()}"
    sk.shutdown()
    return found


def said(program: Callable[[], Any]) -> str:
    try:
        program()
    except Exception as exc:  # noqa: BLE001
        return f"{type(exc).__name__}: {exc}"
    return "nothing raised"


def step_of(model: Any, optimizer: Any, rank: int, **compiled: Any) -> Any:
    """Train a model for a step; return it."""
    x, y = data("dense")
    callbacks = compiled.pop("callbacks", [])
    model.compile(optimizer, "mse", **compiled)
    model.fit(
        x[rank::2], y[rank::2], batch_size=SAMPLES, verbose=0, callbacks=callbacks
    )
    return model


def same_class(rank: int, size: int) -> list[bool]:
    import copy

    import keras

    import stretto.keras as sk

    plain = keras.optimizers.Adam(0.5)
    config = keras.optimizers.serialize(plain)
    ours = sk.DistributedOptimizer(plain)
    again = type(ours).from_config(ours.get_config())
    return [
        ours is plain,
        type(ours).__name__ == "Adam",
        isinstance(ours, keras.optimizers.Adam),
        keras.optimizers.serialize(ours) == config,
        type(again) is type(ours),
        type(copy.copy(ours)) is type(copy.deepcopy(ours)) is type(ours),
        "nothing" in said(lambda: sk.DistributedOptimizer("sgd")),
    ]


def saved(rank: int, size: int) -> list[bool]:
    """A file loads without stretto, and continues on all ranks."""
    import tempfile

    import keras

    import stretto.keras as sk

    model = built("dense", 3)
    step_of(model, sk.DistributedOptimizer(keras.optimizers.Adam(0.01)), rank)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.keras"
        model.save(path)
        plain = keras.models.load_model(path)
        ours = sk.load_model(path)
    state = [np.asarray(v) for v in model.optimizer.variables]
    equal = [
        np.array_equal(a, np.asarray(b))
        for a, b in zip(state, ours.optimizer.variables, strict=True)
    ]
    x, y = data("dense")
    for each in (model, ours, plain):
        each.fit(x[rank::2], y[rank::2], batch_size=SAMPLES, shuffle=False, verbose=0)
    return [
        type(plain.optimizer).__mro__[1] is not type(ours.optimizer).__mro__[1],
        all(equal),
        np.allclose(flat(ours), flat(model), rtol=1e-6, atol=1e-7),
        not np.allclose(flat(plain), flat(model), atol=1e-6),
    ]


def callback_used_again(rank: int, size: int) -> list[float]:
    """A second model, and new weights of the first, are broadcast too."""
    import keras

    import stretto.keras as sk

    callback = sk.BroadcastInitialState()
    first, second = (
        step_of(
            built("dense", seed + rank),
            sk.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            rank,
            callbacks=[callback],
        )
        for seed in (3, 5)
    )
    found = [flat(first), flat(second)]
    first.set_weights([w + rank for w in first.get_weights()])
    x, y = data("dense")
    first.fit(x, y, verbose=0, callbacks=[callback])
    found.append(flat(first))
    return [float(np.abs(sk.allreduce(w) - w).max()) for w in found]


def metrics(rank: int, size: int) -> list[float]:
    import keras

    import stretto.keras as sk

    class Sees(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(logs["loss"])

    seen: list[float] = []
    model = built("dense", 3)
    model.compile(sk.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    x, y = data("dense")
    history = model.fit(
        x[rank::2],
        y[rank::2],
        batch_size=SAMPLES,
        verbose=0,
        callbacks=[sk.MetricAverage(), Sees()],
    )
    whole = float(np.mean((model.predict(x, verbose=0) - y) ** 2))
    return [
        round(seen[0] - whole, 5),
        round(history.history["loss"][0] - whole, 5),
    ]


def warm_up(rank: int, size: int) -> list[float]:
    import keras

    import stretto.keras as sk

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(warm.learning_rate())

    rates: list[float] = []
    warm = sk.LearningRateWarmup(2)
    model = built("dense", 3)
    model.compile(sk.DistributedOptimizer(keras.optimizers.SGD(0.8)), "mse")
    x, y = data("dense")
    model.fit(
        x[:8], y[:8], batch_size=4, epochs=3, verbose=0, callbacks=[warm, Rates()]
    )
    return [round(rate, 4) for rate in rates]


def seeds_stay_own(rank: int, size: int) -> bool:
    """Dropout differs by rank after a broadcast, weights don't."""
    import keras

    import stretto.keras as sk

    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5)])
    model.compile("sgd", "mse")
    sk.broadcast_model(model)
    masks = np.asarray(
        keras.ops.convert_to_numpy(model(np.ones((1, 64)), training=True))
    )
    mean = sk.allreduce(masks)
    return bool(np.abs(mean - masks).max() > 0)


def overflow_on_one_rank(rank: int, size: int) -> list[bool]:
    """All ranks skip a step whose gradients aren't finite on one of them."""
    import keras

    import stretto.keras as sk

    inner = keras.optimizers.SGD(0.1)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    model = built("dense", 3)
    model.compile(sk.DistributedOptimizer(scaled), "mse")
    x, y = data("dense")
    before = flat(model)
    model.fit(x, y * (np.inf if rank else 1), batch_size=SAMPLES, verbose=0)
    skipped = flat(model)
    model.fit(x, y, batch_size=SAMPLES, verbose=0)
    return [
        np.array_equal(before, skipped),
        float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 2.0,
        not np.array_equal(before, flat(model)),
    ]


def several_steps_an_execution(rank: int, size: int) -> bool:
    """A loop within the graph reduces as often."""
    import keras

    import stretto.keras as sk

    found = []
    x, y = data("dense")
    count = 1 if keras.backend.backend() == "torch" else 3  # torch has no such loop
    for steps in (1, count):
        model = built("dense", 3)
        optimizer = sk.DistributedOptimizer(keras.optimizers.SGD(0.05))
        model.compile(optimizer, "mse", steps_per_execution=steps)
        model.fit(x[rank::2], y[rank::2], batch_size=2, shuffle=False, verbose=0)
        found.append(flat(model))
    return bool(np.allclose(*found, rtol=1e-6, atol=1e-7))


def refused(rank: int, size: int) -> dict[str, str]:
    import keras

    import stretto.keras as sk

    def sgd() -> Any:
        return sk.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def within_scaling() -> None:
        scaled = keras.optimizers.LossScaleOptimizer(sgd())
        step_of(built("dense", 3), scaled, rank)

    return {
        "scaling": said(within_scaling),
        "twice": said(lambda: sk.DistributedOptimizer(sgd())),
        "op": said(lambda: sk.DistributedOptimizer("sgd", op="mean")),
        "class": said(lambda: sk.DistributedOptimizer(keras.optimizers.SGD)),
        "models": said(lambda: sk.broadcast_model(built(MODELS[rank], 3))),
        "unbuilt": said(lambda: sk.broadcast_model(keras.Sequential())),
        "shard": said(lambda: sk.shard(5)),
        "steps": said(lambda: fit_for(8 * (2 + rank), sgd())),
    }


def fit_for(samples: int, optimizer: Any, *callbacks: Any) -> None:
    """Train with eight samples a step, over again."""
    import stretto.keras as sk

    model = built("dense", 3)
    model.compile(optimizer, "mse")
    x, y = data("dense")
    model.fit(
        np.resize(x, (samples, WIDTH)),
        np.resize(y, (samples, 1)),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[sk.BroadcastInitialState(), *callbacks],
    )


def stopped_on_one_rank(rank: int, size: int) -> list[bool]:
    """A rank that leaves an epoch is named; ends the ranks' communication."""
    import keras

    import stretto.keras as sk

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = bool(rank)

    optimizer = sk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    text = said(lambda: fit_for(24, optimizer, Stop()))
    return ["rank 0: 6 tensors" in text, "rank 1: the end of an epoch" in text]


def refused_on_tensorflow(rank: int, size: int) -> dict[str, str]:
    import keras

    import stretto.keras as sk

    if keras.backend.backend() != "tensorflow":
        return {}
    import tensorflow as tf

    def in_strategy() -> None:
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            optimizer = sk.DistributedOptimizer(keras.optimizers.SGD(0.1))
            step_of(built("dense", 3), optimizer, rank)

    def jit() -> None:
        model = built("dense", 3)
        optimizer = sk.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        stepper = tensorflow_stepper(model, optimizer, keras.losses.MeanSquaredError())
        tf.function(stepper.python_function, jit_compile=True)(*data("dense"))

    return {"strategy": said(in_strategy), "jit": said(jit)}


def jit_is_turned_off(rank: int, size: int) -> bool:
    import keras

    import stretto.keras as sk

    if keras.backend.backend() != "tensorflow":
        return False
    optimizer = sk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = step_of(
        built("dense", 3),
        optimizer,
        rank,
        jit_compile=True,
        callbacks=[sk.BroadcastInitialState()],
    )
    return bool(model.jit_compile)


def after_refusals(rank: int, size: int) -> float:
    import stretto.keras as sk

    return float(sk.allreduce(np.float32(rank)))


PROGRAMS = {
    f.__name__: f
    for f in (
        same_class,
        saved,
        callback_used_again,
        metrics,
        warm_up,
        seeds_stay_own,
        overflow_on_one_rank,
        several_steps_an_execution,
        refused,
        refused_on_tensorflow,
        jit_is_turned_off,
        after_refusals,
        stopped_on_one_rank,  # the last one
    )
}


# The tests.


@pytest.fixture(scope="module")
def on_ranks(
    tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers
) -> Iterator[Callable[..., Any]]:
    kept: dict[Any, Any] = {}

    def run(function: Callable[..., Any], size: int, backend: str, *args: Any) -> Any:
        if importlib.util.find_spec(backend) is None:
            pytest.skip(f"needs {backend}")
        key = (function, size, backend)
        if key not in kept:
            ranks = Ranks(tmp_path_factory.mktemp("keras"), rank_servers)
            kept[key] = ranks(function, size, backend, *args, timeout_s=400.0)
        return kept[key]

    return run


def require_equal_weights(ranks: list[Any], key: str) -> None:
    assert len(ranks[0][f"{key} alone"]) == STEPS
    for found in ranks:
        for got, want in zip(found[key], ranks[0][f"{key} alone"], strict=True):
            assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


ON_FOUR = ["dense", "embedding"]
"""Models that four ranks train too."""


@pytest.mark.parametrize("way", [f"{way.__name__} {name}" for way, name in WAYS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_those_of_one_process(on_ranks, backend, way):
    names = [name for _, name in WAYS]
    require_equal_weights(on_ranks(trained, 2, backend, names), way)


@pytest.mark.repeat
@pytest.mark.parametrize("way", ["fitted dense", "fitted embedding", "looped dense"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_on_four_ranks_are_those_of_one_process(on_ranks, backend, way):
    require_equal_weights(on_ranks(trained, 4, backend, ON_FOUR), way)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("program", "want"),
    [
        ("same_class", [True] * 7),
        ("saved", [True] * 4),
        ("callback_used_again", [0.0] * 3),
        ("metrics", [0.0, 0.0]),
        ("warm_up", [0.5, 0.6, 0.7, 0.8, 0.8, 0.8]),
        ("seeds_stay_own", True),
        ("overflow_on_one_rank", [True] * 3),
        ("several_steps_an_execution", True),
        ("jit_is_turned_off", False),
        ("after_refusals", 0.5),
        ("stopped_on_one_rank", [True, True]),
    ],
)
def test_a_program_returns_on_both_ranks(on_ranks, backend, program, want):
    assert [found[program] for found in on_ranks(small, 2, backend)] == [want] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("scaling", "Put it outside"),
        ("twice", "distributed already"),
        ("op", "op must be one of"),
        ("class", "must be one of Keras 3"),
        ("models", "have different variables"),
        ("unbuilt", "no weights yet"),
        ("shard", "use 4 or 6"),
        ("steps", "(rank 0: 2; rank 1: 3)"),
    ],
)
def test_what_ranks_cannot_do_is_refused(on_ranks, backend, what, says):
    for found in on_ranks(small, 2, backend):
        assert says in found["refused"][what]


@pytest.mark.parametrize(
    ("what", "says"),
    [("strategy", "OneDeviceStrategy isn't provided"), ("jit", "jit_compile=False")],
)
def test_what_tensorflow_cannot_do_is_refused(on_ranks, what, says):
    for found in on_ranks(small, 2, "tensorflow"):
        assert says in found["refused_on_tensorflow"][what]
