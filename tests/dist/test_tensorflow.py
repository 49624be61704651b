"""`stretto.horovod.tensorflow` on ranks: all programs run in one group of processes."""

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

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs tensorflow", allow_module_level=True)

STEPS = 20
SAMPLES = 24


# What runs on ranks.


def value_of(x: Any) -> Any:
    if hasattr(x, "indices"):
        return (x.values.numpy().tolist(), x.indices.numpy().tolist())
    if isinstance(x, list | tuple):
        return [value_of(each) for each in x]
    return x.numpy().tolist()


def both_ways(function: Callable[[], Any]) -> Any:
    """The value, if a call and one from a graph agree."""
    import tensorflow as tf

    eager, graph = value_of(function()), value_of(tf.function(function)())
    return eager if eager == graph else ("eager and graph differ", eager, graph)


def operations(rank: int, size: int) -> dict[str, Any]:
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    x = tf.constant([1.0, 2.0]) * (rank + 1)
    rows = tf.fill([rank + 1, 2], float(rank))
    slices = tf.IndexedSlices(
        tf.fill([1, 2], rank + 1.0), tf.constant([rank]), tf.constant([4, 2])
    )
    programs = {
        "allreduce": lambda: hvd.allreduce(x),
        "average": lambda: hvd.allreduce(x, op=hvd.Average, name="named"),
        "sum": lambda: hvd.allreduce(x, op=hvd.Sum),
        "max": lambda: hvd.allreduce(x, op=hvd.Max),
        "min": lambda: hvd.allreduce(x, op=hvd.Min),
        "product": lambda: hvd.allreduce(x, op=hvd.Product),
        "factors": lambda: hvd.allreduce(
            x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
        ),
        "fp16": lambda: hvd.allreduce(x, compression=hvd.Compression.fp16),
        "bfloat16": lambda: hvd.allreduce(tf.cast(x, tf.bfloat16), op=hvd.Sum),
        "int64": lambda: hvd.allreduce(tf.constant([rank], tf.int64), op=hvd.Sum),
        "bool": lambda: hvd.broadcast(tf.constant([rank == 1]), 1),
        "scalar": lambda: hvd.allreduce(tf.constant(float(rank))),
        "slices": lambda: hvd.allreduce(slices),
        "grouped": lambda: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum),
        "allgather": lambda: hvd.allgather(rows),
        "grouped_allgather": lambda: hvd.grouped_allgather([rows, x]),
        "broadcast": lambda: hvd.broadcast(x, 1),
        "alltoall": lambda: hvd.alltoall(tf.constant([rank * 10, rank * 10 + 1])),
        "splits": lambda: hvd.alltoall(
            tf.constant([rank, rank, rank]), splits=tf.constant([1, 2])
        ),
        "reducescatter": lambda: hvd.reducescatter(x, op=hvd.Sum),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter([x, 2 * x]),
        "sizes": lambda: [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        ],
    }
    return {name: both_ways(program) for name, program in programs.items()}


def derivatives(rank: int, size: int) -> dict[str, Any]:
    """Gradients of a sum of the result, whose weights are this rank's own."""
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    programs = {
        "allreduce": lambda x: hvd.allreduce(x),
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "grouped": lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[0],
        "allgather": lambda x: hvd.allgather(x[: rank + 1]),
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": lambda x: hvd.alltoall(x, splits=[1, 0])[0],
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    }
    found = {}
    for name, program in programs.items():

        def gradient(program: Any = program) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = program(x) * (rank + 1.0)
            return tape.gradient(result, x)

        found[name] = both_ways(gradient)
    return found


def model_of(seed: int) -> list[Any]:
    import tensorflow as tf

    chance = np.random.default_rng(seed)
    return [
        tf.Variable(chance.normal(size=shape).astype("f4") / 3)
        for shape in ((11, 4), (4, 16), (16,), (16, 1))
    ]


def weights_of_tape(part: slice, seed: int, ways: Any, *, graph: bool) -> list[Any]:
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    chance = np.random.default_rng(0)
    ids = chance.integers(0, 11, size=SAMPLES)[part]
    targets = chance.normal(size=(SAMPLES, 1)).astype("f4")[part]
    variables = model_of(seed)
    if ways is not None:
        hvd.broadcast_variables(variables, root_rank=0)

    def step() -> None:
        with tf.GradientTape() as tape:
            table, a, b, c = variables
            hidden = tf.tanh(tf.gather(table, ids) @ a + b)
            loss = tf.reduce_mean((hidden @ c - targets) ** 2)
        if ways is not None:
            tape = hvd.DistributedGradientTape(tape, **ways)
        for variable, g in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(g))

    run = tf.function(step) if graph else step
    found = []
    for _ in range(STEPS):
        run()
        found.append(np.concatenate([np.ravel(v.numpy()) for v in variables]))
    return found


TAPES: dict[str, tuple[dict[str, Any], bool]] = {
    "graph": ({}, True),
    "eager": ({}, False),
    "dense": ({"sparse_as_dense": True}, True),
    "predivided": ({"gradient_predivide_factor": 2.0, "sparse_as_dense": True}, True),
    "groups": ({"groups": 2, "num_groups": 1}, True),
}


def tapes(rank: int, size: int) -> dict[str, Any]:
    import stretto.horovod.tensorflow as hvd

    share = SAMPLES // size
    part = slice(rank * share, rank * share + share)
    found: dict[str, Any] = {
        name: weights_of_tape(part, rank, ways, graph=graph)
        for name, (ways, graph) in TAPES.items()
        if size == 2 or name == "graph"
    }
    alone = weights_of_tape(slice(None), 0, None, graph=True)
    hvd.allreduce(0.0)
    return {**found, "alone": alone}


def tape_details(rank: int, size: int) -> dict[str, Any]:
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    unused = tf.Variable(1.0)

    def gradients(**ways: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * (shared + 2.0 * own)
        ours = hvd.DistributedGradientTape(tape, **ways)
        ours.register_local_source(own)
        return ours, loss

    tape, loss = gradients()
    scaled = value_of(tape.gradient(loss, [shared, own]))
    tape, loss = gradients(scale_local_gradients=False)
    unscaled = value_of(tape.gradient(loss, [shared, own]))
    tape, loss = gradients(op=hvd.Sum)
    local, others = tape.get_local_and_global_gradients(loss, [shared, own])
    tape, loss = gradients()
    nested = tape.gradient(loss, {"a": shared, "b": [own, unused]})
    tape, loss = gradients(compression=hvd.Compression.fp16)
    compressed = value_of(tape.gradient(loss, [shared]))
    return {
        "scaled": scaled,
        "unscaled": unscaled,
        "local": [value_of(g) for _, g in local],
        "others": [value_of(g) for _, g in others],
        "nested": [value_of(nested["a"]), nested["b"][1] is None],
        "compressed": compressed,
        "is a tape": isinstance(tape, tf.GradientTape),
    }


def second_order(rank: int, size: int) -> list[Any]:
    """A reduced gradient's square, differentiated, is that of one process."""
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    w = tf.Variable(2.0)
    rows = tf.Variable([[1.0], [2.0]])

    def penalty() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = (rank + 1.0) * w**3
            found = hvd.DistributedGradientTape(inner).gradient(loss, w)
            value = found**2
        return hvd.DistributedGradientTape(outer).gradient(value, w)

    def of_rows() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = (rank + 1.0) * tf.reduce_sum(tf.gather(rows, [rank]) ** 3)
            found = hvd.DistributedGradientTape(inner).gradient(loss, rows)
            value = tf.reduce_sum(tf.convert_to_tensor(found) ** 2)
        tape = hvd.DistributedGradientTape(outer, sparse_as_dense=True)
        return tape.gradient(value, rows)

    return [both_ways(penalty), both_ways(of_rows)]


def objects(rank: int, size: int) -> list[Any]:
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    pair = [tf.Variable([rank, 2 * rank]), tf.Variable(float(rank))]
    hvd.broadcast_variables(pair, root_rank=1)
    third = tf.Variable([rank])
    hvd.broadcast_([third], 1)
    return [
        value_of(pair),
        value_of(third),
        hvd.broadcast_object({"rank": rank}, root_rank=1),
        hvd.broadcast_object_fn(root_rank=0)(rank),
        hvd.allgather_object(rank),
        hvd.size(),
        hvd.is_initialized(),
    ]


def synchronized_norm(rank: int, size: int) -> bool:
    """Moments and gradients are those of one process with the whole batch."""
    import keras
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    chance = np.random.default_rng(0)
    x = (chance.normal(size=(8, 3, 5)) * 2 + 30).astype("f4")
    share = x[rank * 4 : rank * 4 + 4]
    results = []
    for layer, inputs in (
        (keras.layers.BatchNormalization(momentum=0.5), x),
        (hvd.SyncBatchNormalization(momentum=0.5), share),
    ):

        @tf.function
        def step(values: Any, layer: Any = layer) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(values)
                loss = tf.reduce_mean(layer(values, training=True) ** 3)
            return tape.gradient(loss, values)

        layer.build(x.shape)
        gradient = step(tf.constant(inputs)).numpy()
        results.append((gradient, [v.numpy() for v in layer.weights]))
    (whole, want), (part, got) = results
    # The mean over the whole batch is half of the sum of the ranks' means.
    close = np.allclose(
        part / size, whole[rank * 4 : rank * 4 + 4], rtol=1e-3, atol=1e-6
    )
    return bool(close) and all(
        np.allclose(a, b, rtol=1e-5) for a, b in zip(want, got, strict=True)
    )


def keras_names(rank: int, size: int) -> dict[str, Any]:
    import tempfile

    import keras

    import stretto.horovod.keras as hvd_keras
    import stretto.horovod.tensorflow.keras as hvd

    def fit(optimizer: Any, callbacks: Any = (), epochs: int = 1) -> Any:
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(
            x[rank::size],
            y[rank::size],
            batch_size=2,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[start, *callbacks],
        )
        return model

    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(8, 2)), chance.normal(size=(8, 1))
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(round(logs["lr"], 3))
    )
    sgd = keras.optimizers.SGD
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2)
    metric = hvd.callbacks.MetricAverageCallback()
    model = fit(
        hvd.DistributedOptimizer(sgd(0.4)), [metric, warm, schedule, note], epochs=4
    )
    weights = [w.tolist() for w in model.get_weights()]
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = hvd_keras.load_model(f"{folder}/model.keras")
    sums = fit(hvd.DistributedOptimizer(sgd(0.1), backward_passes_per_step=2))
    means = fit(
        hvd_keras.DistributedOptimizer(sgd(0.2)).__class__.from_config(
            {**sgd(0.2).get_config(), "gradient_accumulation_steps": 2}
        )
    )
    return {
        "rates": rates,
        "equal": hvd.allreduce(np.float32(0)).item() == 0
        and all(w == weights for w in hvd_allgather(weights)),
        "loaded": type(loaded.optimizer).__name__ == "SGD"
        and hasattr(loaded.optimizer, "_stretto_reduce"),
        "passes": np.allclose(sums.get_weights()[0], means.get_weights()[0], rtol=1e-6),
        "values": [
            hvd.allreduce(float(rank)).item(),
            hvd.allgather([rank]).tolist(),
            hvd.broadcast([rank], 1).tolist(),
            hvd.reducescatter([1.0, 3.0]).tolist(),
        ],
    }


def hvd_allgather(obj: Any) -> list[Any]:
    import stretto.horovod.tensorflow as hvd

    found: list[Any] = hvd.allgather_object(obj)
    return found


def process_sets(rank: int, size: int) -> Any:
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    mine = SETS[rank]
    v = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = v * (rank + 1.0)
    tape = hvd.DistributedGradientTape(tape, process_set=mine)
    return [
        value_of(tape.gradient(loss, [v])),
        value_of(hvd.allreduce(tf.constant(rank + 1.0), process_set=mine)),
        both_ways(lambda: hvd.size_op(mine.process_set_id)),
        both_ways(lambda: hvd.process_set_included_op(SETS[0].process_set_id)),
    ]


SETS: list[Any] = []


def said(program: Callable[[], Any]) -> str:
    try:
        program()
    except Exception as exc:  # noqa: BLE001
        return f"{type(exc).__name__}: {exc}"
    return "nothing raised"


def refused(rank: int, size: int) -> dict[str, str]:
    import keras
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd
    import stretto.horovod.tensorflow.keras as hvd_keras

    x = tf.ones([2 + rank])

    @tf.function(jit_compile=True)
    def compiled(v: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(v)
            loss = tf.reduce_sum(v * v)
        return hvd.DistributedGradientTape(tape).gradient(loss, v)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def unknown(v: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(v)
            loss = tf.reduce_sum(v * v)
        return hvd.DistributedGradientTape(tape).gradient(loss, v)

    return {
        "shapes": said(lambda: hvd.allreduce(x)),
        "shapes in a graph": said(lambda: tf.function(lambda: hvd.allreduce(x))()),
        "adasum": said(lambda: hvd.allreduce(x, op=hvd.Adasum)),
        "string": said(lambda: hvd.allreduce(tf.constant(["a"]))),
        "xla": said(lambda: compiled(tf.ones([2]))),
        "unknown": said(lambda: unknown(tf.ones([2]))),
        "hook": said(lambda: hvd.BroadcastGlobalVariablesHook(0)),
        "global": said(lambda: hvd.broadcast_global_variables(0)),
        "partial": said(lambda: hvd_keras.PartialDistributedOptimizer("sgd")),
        "session": said(lambda: hvd.broadcast_object(1, session=object())),
        "twice": said(
            lambda: hvd.DistributedGradientTape(
                hvd.DistributedGradientTape(tf.GradientTape())
            )
        ),
        "jacobian": said(
            lambda: hvd.DistributedGradientTape(tf.GradientTape()).jacobian(x, x)
        ),
        "legacy": said(lambda: hvd_keras.load_model("file", legacy_opts=True)),
        "tf1": said(
            lambda: hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer())
        ),
        "built": said(
            lambda: hvd.DistributedOptimizer(
                built_optimizer(keras), backward_passes_per_step=2
            )
        ),
    }


def built_optimizer(keras: Any) -> Any:
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable(1.0)])
    return optimizer


def an_error_between(rank: int, size: int) -> list[Any]:
    """A step that one rank leaves half done is an error on the other; all continue."""
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd
    from stretto.horovod.tensorflow.gradients import reduce_gradients
    from stretto.runtime.reduction_rounds import Rounds

    w = tf.ones([600_000])  # larger than what is sent by one call

    @tf.function
    def step() -> Any:
        return reduce_gradients([w * 2.0, w * float(rank)], op=hvd.Sum)[1][:1]

    def failing(self: Any, ticket: int, index: int, array: Any) -> None:
        if index == 0 and rank == 1:
            raise OSError("no more disk")
        submit(self, ticket, index, array)

    submit, Rounds.submit = Rounds.submit, failing
    try:
        found = said(step)
    finally:
        Rounds.submit = submit
    return ["has no results" in found, "no more disk" in found, value_of(step())]


def after_all(rank: int, size: int) -> float:
    import stretto.horovod.tensorflow as hvd

    return value_of(hvd.allreduce(float(rank)))


PROGRAMS = {
    f.__name__: f
    for f in (
        operations,
        derivatives,
        tapes,
        tape_details,
        second_order,
        objects,
        synchronized_norm,
        keras_names,
        process_sets,
        refused,
        an_error_between,
        after_all,
    )
}


def start() -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def small(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    start()
    import stretto.horovod.tensorflow as hvd

    SETS[:] = [hvd.ProcessSet([r]) for r in range(size)]
    hvd.init(process_sets=SETS)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = PROGRAMS[name](rank, size)
        except Exception as exc:  # noqa: BLE001
            import traceback

            found[name] = f"{exc!r}\n{traceback.format_exc()}"
    hvd.shutdown()
    return found


def on_one_core(rank: int, size: int) -> list[bool]:
    """All ranks share a core, and TensorFlow has one thread for operations."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start()
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import stretto.horovod.tensorflow as hvd
    from stretto.horovod.tensorflow.gradients import reduce_gradients

    hvd.init()
    ws = [tf.eye(48) * (0.5 + k / 20) for k in range(12)]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(ws)
            # The ranks' gradients become ready in opposite orders.
            for w in ws if rank else ws[::-1]:
                x = tf.tanh(x @ w)
            loss = tf.reduce_sum(x)
        local = tape.gradient(loss, ws)
        return local, reduce_gradients(local)

    x = tf.ones([4, 48]) / 48
    local, _ = step(x)
    want = hvd.grouped_allreduce(local)
    equal = all(
        np.allclose(a, b, rtol=1e-6)
        for _ in range(300)
        for a, b in zip(step(x)[1], want, strict=True)
    )
    from stretto.horovod import world
    from stretto.horovod.process_sets import global_process_set

    rounds = world.current().member(global_process_set).rounds
    (exchange,) = rounds._exchanges.values()
    kept = exchange.in_stable_order
    hvd.shutdown()
    return [equal, kept]


# The tests.


@pytest.fixture(scope="module")
def on_ranks(
    tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers
) -> Iterator[Callable[..., Any]]:
    kept: dict[Any, Any] = {}

    def run(function: Callable[..., Any], size: int, *args: Any) -> Any:
        key = (function, size)
        if key not in kept:
            ranks = Ranks(tmp_path_factory.mktemp("tensorflow"), rank_servers)
            kept[key] = ranks(function, size, *args, timeout_s=400.0)
        return kept[key]

    return run


@pytest.fixture
def programs(on_ranks: Any) -> list[dict[str, Any]]:
    return on_ranks(small, 2, list(PROGRAMS))


BOTH: dict[str, Any] = {
    "allreduce": [1.5, 3.0],
    "average": [1.5, 3.0],
    "sum": [3.0, 6.0],
    "max": [2.0, 4.0],
    "min": [1.0, 2.0],
    "product": [2.0, 8.0],
    "factors": [3.0, 6.0],
    "fp16": [1.5, 3.0],
    "bfloat16": [3.0, 6.0],
    "int64": [1],
    "bool": [True],
    "scalar": 0.5,
    "slices": ([[0.5, 0.5], [1.0, 1.0]], [0, 1]),
    "grouped": [[3.0, 6.0], [6.0, 12.0]],
    "allgather": [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
    "grouped_allgather": [
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
        [1.0, 2.0, 2.0, 4.0],
    ],
    "broadcast": [2.0, 4.0],
}
"""Results that are equal on both ranks."""


@pytest.mark.parametrize("name", BOTH)
def test_an_operation_returns_on_both_ranks(programs, name):
    assert [found["operations"][name] for found in programs] == [BOTH[name]] * 2


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("alltoall", [[0, 10], [1, 11]]),
        ("splits", [[[0, 1], [1, 1]], [[0, 0, 1, 1], [2, 2]]]),
        ("reducescatter", [[3.0], [6.0]]),
        ("grouped_reducescatter", [[[1.5], [3.0]], [[3.0], [6.0]]]),
        ("sizes", [[0, 2, 0, 2, 1], [1, 2, 1, 2, 1]]),
    ],
)
def test_an_operation_returns_on_each_rank(programs, name, want):
    assert [found["operations"][name] for found in programs] == want


ONES = [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("allreduce", [np.multiply(ONES, 1.5)] * 2),
        ("sum", [np.multiply(ONES, 3)] * 2),
        ("grouped", [np.multiply(ONES, 3)] * 2),
        ("allgather", [[[1.5, 1.5], [0, 0]], np.multiply(ONES, 1.5)]),
        ("broadcast", [np.zeros((2, 2)), np.multiply(ONES, 1.5)]),
        ("alltoall", [[[1, 1], [0, 0]]] * 2),
        ("reducescatter", [[[2, 2], [4, 4]]] * 2),
    ],
)
def test_an_operations_gradient(programs, name, want):
    for found, expected in zip(programs, want, strict=True):
        np.testing.assert_allclose(found["derivatives"][name], expected)


def require_equal_weights(ranks: list[Any], name: str) -> None:
    want = ranks[0]["tapes"]["alone"]
    assert len(want) == STEPS
    for found in ranks:
        for got, expected in zip(found["tapes"][name], want, strict=True):
            assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", TAPES)
def test_weights_with_a_tape_are_those_of_one_process(programs, name):
    require_equal_weights(programs, name)


@pytest.mark.repeat
def test_weights_with_a_tape_on_four_ranks_are_those_of_one_process(on_ranks):
    require_equal_weights(on_ranks(small, 4, ["tapes"]), "graph")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("scaled", [[1.5, 1.0], [1.5, 2.0]]),
        ("unscaled", [[1.5, 2.0], [1.5, 4.0]]),
        ("local", [[1.0], [2.0]]),
        ("others", [[3.0], [3.0]]),
        ("nested", [[1.5, True]] * 2),
        ("compressed", [[1.5]] * 2),
        ("is a tape", [True, True]),
    ],
)
def test_a_tape_returns_on_each_rank(programs, name, want):
    assert [found["tape_details"][name] for found in programs] == want


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (
            "objects",
            [[[[1, 2], 1.0], [1], {"rank": 1}, 0, [0, 1], 2, True]] * 2,
        ),
        ("second_order", [[648.0, [[9.0], [288.0]]]] * 2),
        ("synchronized_norm", [True, True]),
        ("process_sets", [[[1.0], 1.0, 1, 1], [[2.0], 2.0, 1, 0]]),
        ("an_error_between", [[True, False, [1.0]], [False, True, [1.0]]]),
        ("after_all", [0.5, 0.5]),
    ],
)
def test_a_program_returns_on_each_rank(programs, program, want):
    assert [found[program] for found in programs] == want


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("rates", [[0.3, 0.4, 0.4, 0.2]] * 2),
        ("equal", [True, True]),
        ("loaded", [True, True]),
        ("passes", [True, True]),
        ("values", [[0.5, [0, 1], [1], [1.0]], [0.5, [0, 1], [1], [3.0]]]),
    ],
)
def test_horovods_names_for_keras(programs, name, want):
    assert [found["keras_names"][name] for found in programs] == want


def test_opposite_orders_on_one_core_do_not_hang(on_ranks):
    """And gradients are sent in one order, so ranks stop to negotiate."""
    assert on_ranks(on_one_core, 2) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shapes", "shape"),
        ("shapes in a graph", "shape"),
        ("adasum", "Use op=hvd.Average"),
        ("string", "dtype must be one of"),
        ("xla", "jit_compile=False"),
        ("unknown", "give its variable a shape"),
        ("hook", "broadcast_variables"),
        ("global", "broadcast_variables"),
        ("partial", "register_local_source"),
        ("session", "without session="),
        ("twice", "distributed already"),
        ("jacobian", "isn't distributed"),
        ("legacy", "legacy_opts"),
        ("tf1", "one of Keras 3"),
        ("built", "isn't built"),
    ],
)
def test_what_is_not_provided_is_refused(programs, what, says):
    for found in programs:
        assert says in found["refused"][what]
