"""`stretto.jax` on ranks: all programs run in one pair of processes per fixture."""

from __future__ import annotations

import importlib.util
import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.ranks import RankServers

pytest.importorskip("jax")
pytest.importorskip("optax")

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

STEPS = 20
SAMPLES = 24


# What runs on ranks.


def data(seed: int = 0, width: int = 8) -> tuple[Any, Any]:
    chance = np.random.default_rng(seed)
    inputs = chance.normal(size=(SAMPLES, width)).astype("f4")
    return inputs, np.sin(inputs.sum(1)).astype("f4")


def mlp() -> tuple[Any, Callable[..., Any]]:
    import jax.numpy as jnp

    chance = np.random.default_rng(1)
    sizes = (8, 32, 32, 32, 32, 1)
    params = {
        "layers": [
            {
                "w": jnp.asarray(chance.normal(size=(a, b)).astype("f4") / a**0.5),
                "b": jnp.zeros((b,)),
            }
            for a, b in itertools.pairwise(sizes)
        ],
        "unused": jnp.ones((3,)),
        "none": None,
    }

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        for layer in params["layers"]:
            inputs = jnp.tanh(inputs @ layer["w"] + layer["b"])
        return ((inputs[:, 0] - targets) ** 2).mean()

    return params, loss


def conv() -> tuple[Any, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    chance = np.random.default_rng(2)
    params = {
        "conv": jnp.asarray(chance.normal(size=(4, 1, 3)).astype("f4")),
        "out": jnp.asarray(chance.normal(size=(4,)).astype("f4")),
        "scale": jnp.asarray(np.float32(1.0)),
    }

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        found = jax.lax.conv(inputs[:, None, :], params["conv"], (1,), "SAME")
        found = jnp.tanh(found * params["scale"]).mean(2) @ params["out"]
        return ((found - targets) ** 2).mean()

    return params, loss


def scanned() -> tuple[Any, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    chance = np.random.default_rng(3)
    params = {
        "stack": jnp.asarray(chance.normal(size=(5, 8, 8)).astype("f4") / 3),
        "shared": jnp.ones((8,)),
    }

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        @jax.checkpoint
        def body(hidden: Any, layer: Any) -> tuple[Any, None]:
            return jnp.tanh(hidden @ layer) * params["shared"], None

        hidden, _ = jax.lax.scan(body, inputs, params["stack"])
        return ((hidden.sum(1) - targets) ** 2).mean()

    return params, loss


def layered() -> tuple[Any, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    chance = np.random.default_rng(4)
    params = {
        "layers": {
            "w": jnp.asarray(chance.normal(size=(5, 8, 8)).astype("f4") / 3),
            "b": jnp.zeros((5, 8)),
        },
        "out": jnp.ones((8,)),
    }

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        @jax.checkpoint
        def body(hidden: Any, layer: Any) -> tuple[Any, None]:
            layer = sj.in_backward(layer)
            return jnp.tanh(hidden @ layer["w"] + layer["b"]), None

        hidden, _ = jax.lax.scan(body, inputs, params["layers"])
        return ((hidden @ params["out"] - targets) ** 2).mean()

    return params, loss


def flax_model() -> tuple[Any, Callable[..., Any]]:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Net(nn.Module):
        @nn.compact
        def __call__(self, inputs: Any) -> Any:
            hidden = nn.LayerNorm()(nn.relu(nn.Dense(16)(inputs)))
            return nn.Dense(1)(hidden)[:, 0]

    net = Net()
    params = net.init(jax.random.key(0), jnp.zeros((1, 8)))

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return ((net.apply(params, inputs) - targets) ** 2).mean()

    return params, loss


def nnx_model() -> tuple[Any, Callable[..., Any]]:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.inner = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.out = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, inputs: Any) -> Any:
            return self.out(self.norm(nnx.relu(self.inner(inputs))))[:, 0]

    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return ((nnx.merge(graph, params)(inputs) - targets) ** 2).mean()

    return params, loss


def equinox_model() -> tuple[Any, Callable[..., Any]]:
    import equinox as eqx
    import jax

    net = eqx.nn.MLP(8, "scalar", 16, 2, jax.nn.gelu, key=jax.random.key(1))
    params, rest = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        found = jax.vmap(eqx.combine(params, rest))(inputs)
        return ((found - targets) ** 2).mean()

    return params, loss


MODELS = {
    "mlp": mlp,
    "conv": conv,
    "scanned": scanned,
    "layered": layered,
    "flax": flax_model,
    "nnx": nnx_model,
    "equinox": equinox_model,
}


NEEDS = {"flax": "flax", "nnx": "flax", "equinox": "equinox"}
"""Packages of models."""

ON_FOUR = ("mlp", "layered", "flax", "nnx", "equinox")
"""Models that four ranks train too."""


def is_missing(model: str) -> bool:
    return model in NEEDS and importlib.util.find_spec(NEEDS[model]) is None


def train(model: str, way: str, part: slice) -> list[Any]:
    """Each step's parameters, as one row; ``way`` is ``alone`` for one process."""
    import jax
    import jax.numpy as jnp
    import optax

    import stretto.jax as sj

    params, loss = MODELS[model]()
    tx = optax.adam(1e-2)
    if way == "value_and_grad":
        scanned = (lambda params: params["layers"]) if model == "layered" else None
        differentiated = sj.value_and_grad(loss, scanned=scanned)
    else:
        differentiated = jax.value_and_grad(loss)
    if way == "distributed":
        tx = sj.distributed(tx)
    state = tx.init(params)

    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        _, grads = differentiated(params, inputs, targets)
        if way == "allreduce_gradients":
            grads = sj.allreduce_gradients(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if way != "eager":
        step = jax.jit(step, donate_argnums=(0, 1))
    inputs, targets = data()
    inputs, targets = jnp.asarray(inputs[part]), jnp.asarray(targets[part])
    rows = []
    for _ in range(STEPS):
        params, state = step(params, state, inputs, targets)
        leaves = jax.tree_util.tree_leaves(params)
        rows.append(np.concatenate([np.ravel(leaf) for leaf in leaves]))
    return rows


WAYS = ("value_and_grad", "allreduce_gradients", "distributed")


def trained(rank: int, size: int, callbacks: str) -> dict[str, Any]:
    """Every model in every way, and the same in one process."""
    os.environ["STRETTO_JAX_CALLBACKS"] = callbacks
    import stretto.jax as sj

    sj.init()
    samples = sj.shard(SAMPLES)
    found: dict[str, Any] = {}
    for model in MODELS:
        if is_missing(model) or (size == 4 and model not in ON_FOUR):
            continue
        if rank == 0:
            found[model, "alone"] = train(model, "alone", slice(None))
        for way in WAYS:
            found[model, way] = train(model, way, slice(samples.start, samples.stop))
    sj.shutdown()
    return found


def small(rank: int, size: int, callbacks: str) -> dict[str, Any]:
    """Programs that are short, by name: what each returned or raised."""
    os.environ["STRETTO_JAX_CALLBACKS"] = callbacks
    import stretto.jax as sj

    sj.init()
    found: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        print("program", name, flush=True)
        try:
            found[name] = program(rank, size)
        except Exception as exc:  # noqa: BLE001
            found[name] = (type(exc).__name__, str(exc))
        sj.barrier()
    sj.shutdown()
    return found


def bitwise(rank: int, size: int) -> bool:
    """Gradients are those of a plain sum of the ranks' local gradients."""
    import jax

    import stretto.jax as sj

    params, loss = mlp()
    inputs, targets = data()
    part = sj.shard(SAMPLES)
    inputs, targets = inputs[part.start : part.stop], targets[part.start : part.stop]
    local = jax.jit(jax.grad(loss))(params, inputs, targets)
    reduced = jax.jit(sj.grad(loss))(params, inputs, targets)
    equal = True
    for mine, got in zip(
        jax.tree_util.tree_leaves(local),
        jax.tree_util.tree_leaves(reduced),
        strict=True,
    ):
        rows = np.asarray(sj.allgather(mine[None]))
        equal &= bool((rows.sum(0) / np.float32(size) == np.asarray(got)).all())
    return equal


def micro_batches(rank: int, size: int) -> list[float]:
    """Two reductions of one function in a step that don't depend on each other."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    inner = jax.jit(sj.grad(lambda w, x: (w * x).sum()))

    @jax.jit
    def step(w: Any, x: Any) -> Any:
        return inner(w, x)[0], inner(w, 10 * x)[0], inner(w, 100 * x)[0]

    w = jnp.ones((300,))
    found = [step(w, jnp.full((300,), rank + k)) for k in (0, 1)]
    return [float(v) for row in found for v in row]


def micro_batches_in_scan(rank: int, size: int) -> list[float]:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    @jax.jit
    def step(w: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return carry, sj.grad(lambda w: (w * x).sum())(w)[0]

        return jax.lax.scan(body, 0, xs)[1]

    xs = jnp.arange(4.0)[:, None] * 10 + rank + jnp.zeros((4, 3))
    return [float(v) for v in step(jnp.ones((3,)), xs)]


def in_while_and_cond(rank: int, size: int) -> float:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    def reduced(w: Any) -> Any:
        return sj.grad(lambda w: (w * w).sum())(w)

    @jax.jit
    def step(w: Any) -> Any:
        w = jax.lax.fori_loop(0, 3, lambda _, w: reduced(w), w)
        return jax.lax.cond(w[0] > 0, reduced, lambda w: w, w)

    return float(step(jnp.full((4,), 1.0 + rank))[0])


def traced_unequally(rank: int, size: int) -> list[float]:
    """A rank that traces again reduces as the others."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    step = jax.jit(sj.grad(lambda w: (w * (1.0 + rank)).sum()))
    found = []
    for _ in range(3):
        if rank == 0:
            jax.clear_caches()
            step = jax.jit(sj.grad(lambda w: (w * (1.0 + rank)).sum()))
        found.append(float(step(jnp.ones((5,)))[0]))
    return found


def used_on_one_rank(rank: int, size: int) -> list[float]:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    def loss(params: Any) -> Any:
        return params["a"].sum() if rank else (params["a"] * params["b"]).sum()

    params = {"a": jnp.ones((4,)), "b": jnp.ones((4,))}
    found = jax.jit(sj.grad(loss))(params)
    return [float(found["a"][0]), float(found["b"][0])]


def result_unused(rank: int, size: int) -> list[float]:
    """A reduction whose result one rank drops still takes part."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    @jax.jit
    def step(w: Any) -> Any:
        value, grads = sj.value_and_grad(lambda w: (w * w).sum())(w)
        return (value,) if rank else (value, grads)

    w = jnp.full((4,), 1.0 + rank)
    step(w)
    return [float(x) for x in np.ravel(np.asarray(step(w)[-1]))]


def an_error_between(rank: int, size: int) -> tuple[str, str, float]:
    """Rank 1's step ends in mid-backward; both ranks continue with the next."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    import stretto.jax as sj

    fails = [rank == 1]

    def check(x: Any) -> Any:
        if fails[0]:
            raise RuntimeError("no more disk")
        return np.asarray(x)

    @jax.custom_vjp
    def checked(x: Any) -> Any:
        return x

    checked.defvjp(
        lambda x: (x, None),
        lambda _, g: (io_callback(check, jax.ShapeDtypeStruct(g.shape, g.dtype), g),),
    )

    def loss(params: Any, x: Any) -> Any:
        return (checked(x @ params["a"]) @ params["b"]).sum()

    step = jax.jit(sj.grad(loss))
    params = {"a": jnp.eye(8), "b": jnp.eye(8)}
    errors = []
    for x in (jnp.ones((2, 8)), (1.0 + rank) * jnp.ones((2, 8))):
        try:
            found = jax.block_until_ready(step(params, x))
        except Exception as exc:  # noqa: BLE001
            errors.append(str(exc))
        fails[0] = False
    sj.barrier()
    said = errors[0]
    return (
        "no more disk" if "no more disk" in said else "",
        "has no results" if "has no results" in said else "",
        float(found["b"][0, 0]),
    )


def dtypes(rank: int, size: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    tree = {
        name: jnp.full((3,), 1 + rank, name)
        for name in ("float32", "float16", "bfloat16", "complex64", "int32")
    }
    tree["scalar"] = jnp.float32(rank)
    tree["empty"] = jnp.zeros((0, 2))
    found = jax.jit(sj.allreduce_gradients)(tree)
    return {k: (str(v.dtype), v.shape, np.asarray(v).sum()) for k, v in found.items()}


SENT = [[2, 2], [1, 1, 2, 2], [2, 2], [3, 3]]


def operations(rank: int, size: int) -> Any:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    @jax.jit
    def inside(x: Any) -> Any:
        return (
            sj.allreduce(x, op=sj.Max),
            sj.allgather({"x": x})["x"],
            sj.broadcast([x], root=1)[0],
        )

    x = jnp.full((2,), 1.0 + rank)
    outside = (
        sj.allreduce(x, op=sj.Sum),
        sj.broadcast(jax.random.PRNGKey(2**32 - 2 + rank), root=1),
        sj.allgather(jnp.array([2**16 - 1 - rank], jnp.uint16)),
    )
    found = [np.asarray(v).tolist() for v in (*inside(x), *outside)]
    return found, sj.broadcast_object({"rank": rank}, root=1), (sj.rank(), sj.size())


MEANS_OF_TWO = [[0.0, 0.0], *[[-5.5, -0.5]] * 2, *[[-13.0, -3.0]] * 2, [-22.5, -7.5]]


def accumulated(rank: int, size: int) -> tuple[list[Any], int]:
    """With every=2 the mean of two steps is sent and applied once."""
    import jax
    import jax.numpy as jnp
    import optax

    import stretto.jax as sj
    from stretto.jax import ranks

    tx = sj.distributed(optax.sgd(1.0), every=2)
    params = jnp.zeros((3,)), jnp.zeros((), jnp.complex64)
    state = tx.init(params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step)
    rounds = ranks.joined().rounds
    before = rounds._last
    found = []
    for k in range(6):
        run = compiled if k < 4 else step
        grads = jnp.full((3,), k + 10.0 * rank), jnp.complex64(k * 1j)
        params, state = run(params, state, grads)
        found.append([float(params[0][0]), float(params[1].imag)])
    return found, rounds._last - before


def refused(rank: int, size: int) -> dict[str, str]:
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    reduce = sj.allreduce_gradients
    w = jnp.ones((2, 3))
    grad = sj.grad(lambda w: (w * w).sum())
    programs = {
        "vmap": lambda: jax.vmap(reduce)(w),
        "vmap of jit": lambda: jax.vmap(jax.jit(reduce))(w),
        "grad": lambda: jax.grad(lambda w: reduce(w).sum())(w),
        "grad of grad": lambda: jax.grad(lambda w: grad(w).sum())(w),
        "grad of jit": lambda: jax.grad(lambda w: jax.jit(grad)(w).sum())(w),
        "nested": lambda: sj.grad(lambda w: (w * grad(jnp.ones(3))[0]).sum())(w),
        "pmap": lambda: jax.pmap(reduce, axis_name="i")(w[:1]),
        "shard": lambda: sj.shard(5),
        "integers": lambda: sj.grad(lambda w: w.sum())(jnp.arange(3)),
    }
    found = {}
    for name, program in programs.items():
        try:
            program()
            found[name] = "nothing raised"
        except Exception as exc:  # noqa: BLE001
            found[name] = f"{type(exc).__name__}: {exc}"
    return found


def after_refusals(rank: int, size: int) -> float:
    import jax.numpy as jnp

    import stretto.jax as sj

    return float(sj.allreduce_gradients(jnp.float32(rank)))


def opposite_orders(rank: int, steps: int) -> bool:
    """Ranks whose gradients are ready in opposite orders: all steps are equal."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    def loss(params: list[Any], x: Any, backwards: bool) -> Any:
        for w in params[::-1] if backwards else params:
            x = jnp.tanh(x @ w)
        return x.sum()

    params = [jnp.eye(48) * (0.5 + k / 20) for k in range(12)]
    x = jnp.ones((4, 48)) / 48
    local = jax.jit(jax.grad(loss), static_argnums=2)
    want = [
        (a + b) / 2
        for a, b in zip(local(params, x, False), local(params, x, True), strict=True)
    ]
    step = jax.jit(sj.grad(loss), static_argnums=2)
    return all(
        bool(jnp.allclose(a, b, rtol=1e-6, atol=0.0))
        for _ in range(steps)
        for a, b in zip(step(params, x, rank == 0), want, strict=True)
    )


def orders(rank: int, size: int) -> bool:
    return opposite_orders(rank, 60)


def on_one_core(rank: int, size: int, callbacks: str) -> bool:
    """All ranks share one core, so each has one thread for XLA's computations."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["STRETTO_JAX_CALLBACKS"] = callbacks
    import stretto.jax as sj

    sj.init()
    equal = opposite_orders(rank, 300)
    sj.shutdown()
    return equal


def used_outside_of_the_scan(rank: int, size: int) -> str:
    """A penalty on rank 1 alone is an error on both ranks."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    def loss(params: Any, x: Any) -> Any:
        def body(hidden: Any, layer: Any) -> tuple[Any, None]:
            return hidden * sj.in_backward(layer), None

        found = jax.lax.scan(body, x, params)[0].sum()
        if rank == 1:
            found += sum((p**2).sum() for p in jax.tree_util.tree_leaves(params)[:1])
        return found

    step = jax.jit(sj.grad(loss, scanned=lambda params: params))
    try:
        jax.block_until_ready(step(jnp.ones((3, 4)), jnp.ones(4)))
    except Exception as exc:  # noqa: BLE001
        return "scan's body only" if "scan's body only" in str(exc) else str(exc)
    return "nothing raised"


def an_array_in_two_places(rank: int, size: int) -> list[float]:
    """Gradients belong to a parameter's place, not to its array."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    def loss(params: Any) -> Any:
        def body(hidden: Any, layer: Any) -> tuple[Any, None]:
            return hidden * sj.in_backward(layer), None

        return jax.lax.scan(body, 1.0 + rank, params["layers"])[0].sum()

    array = jnp.ones((3,))
    params = {"layers": array, "other": array}
    found = sj.grad(loss, scanned=lambda params: params["layers"])(params)
    return [float(found["layers"].sum()), float(found["other"].sum())]


def signatures(rank: int, size: int) -> list[Any]:
    """Results have the form of JAX's."""
    import jax
    import jax.numpy as jnp

    import stretto.jax as sj

    def loss(a: Any, b: Any, *, c: Any) -> Any:
        return (a * b["x"] * c).sum(), {"aux": rank}

    def shape_of(tree: Any) -> Any:
        return jax.tree_util.tree_structure(tree)

    a, b, c = jnp.ones(3), {"x": jnp.ones(3)}, jnp.float32(2)
    found = []
    for numbers in (0, 1, (0, 1), (1, 0), (-1,)):
        ours = sj.value_and_grad(loss, numbers, has_aux=True)(a, b, c=c)
        theirs = jax.value_and_grad(loss, numbers, has_aux=True)(a, b, c=c)
        found.append(shape_of(ours) == shape_of(theirs))
        pair = sj.grad(loss, numbers, has_aux=True)(a, b, c=c)
        found.append(shape_of(pair[0]) == shape_of(theirs[1]))
        found.append(pair[1]["aux"] == rank)
    return found


PROGRAMS = {
    f.__name__: f
    for f in (
        bitwise,
        micro_batches,
        micro_batches_in_scan,
        in_while_and_cond,
        traced_unequally,
        used_on_one_rank,
        result_unused,
        an_error_between,
        dtypes,
        operations,
        accumulated,
        refused,
        after_refusals,
        orders,
        used_outside_of_the_scan,
        an_array_in_two_places,
        signatures,
    )
}


# The tests.


@pytest.fixture(scope="module")
def on_ranks(
    tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers
) -> Iterator[Callable[..., Any]]:
    kept: dict[Any, Any] = {}

    def run(function: Callable[..., Any], size: int, callbacks: str) -> Any:
        key = (function, size, callbacks)
        if key not in kept:
            ranks = Ranks(tmp_path_factory.mktemp("jax"), rank_servers)
            kept[key] = ranks(function, size, callbacks, timeout_s=200.0)
        return kept[key]

    return run


def require_equal_weights(ranks: list[Any], model: str, way: str) -> None:
    for found in ranks:
        for got, want in zip(found[model, way], ranks[0][model, "alone"], strict=True):
            assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_of_one_process(on_ranks, model, way):
    if is_missing(model):
        pytest.skip(f"{model} is not installed")
    require_equal_weights(on_ranks(trained, 2, "buffer"), model, way)


@pytest.mark.repeat
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ON_FOUR)
def test_weights_on_four_ranks_are_those_of_one_process(on_ranks, model, way):
    if is_missing(model):
        pytest.skip(f"{model} is not installed")
    require_equal_weights(on_ranks(trained, 4, "buffer"), model, way)


@pytest.fixture(params=["buffer", "io"])
def programs(request: pytest.FixtureRequest, on_ranks: Any) -> list[dict[str, Any]]:
    return on_ranks(small, 2, request.param)


@pytest.mark.parametrize(
    ("program", "want"),
    [
        ("bitwise", [True, True]),
        ("micro_batches", [[0.5, 5.0, 50.0, 1.5, 15.0, 150.0]] * 2),
        ("micro_batches_in_scan", [[0.5, 10.5, 20.5, 30.5]] * 2),
        ("in_while_and_cond", [24.0, 24.0]),
        ("traced_unequally", [[1.5, 1.5, 1.5]] * 2),
        ("used_on_one_rank", [[1.0, 0.5]] * 2),
        ("result_unused", [[3.0] * 4, [16.0]]),
        ("an_error_between", [("", "has no results", 3.0), ("no more disk", "", 3.0)]),
        ("accumulated", [(MEANS_OF_TWO, 3)] * 2),
        ("after_refusals", [0.5, 0.5]),
        ("orders", [True, True]),
        ("used_outside_of_the_scan", ["scan's body only"] * 2),
        ("an_array_in_two_places", [[4.5, 0.0]] * 2),
        ("signatures", [[True] * 15] * 2),
        (
            "operations",
            [
                (
                    [*SENT, [0, 2**32 - 1], [2**16 - 1, 2**16 - 2]],
                    {"rank": 1},
                    (rank, 2),
                )
                for rank in range(2)
            ],
        ),
    ],
)
def test_a_program_returns_on_each_rank(programs, program, want):
    assert [found[program] for found in programs] == want


def test_opposite_orders_on_one_core_do_not_hang(on_ranks):
    assert on_ranks(on_one_core, 2, "buffer") == [True, True]


def test_every_dtype_is_averaged(programs):
    for found in programs:
        assert found["dtypes"] == {
            "float32": ("float32", (3,), 4.5),
            "float16": ("float16", (3,), 4.5),
            "bfloat16": ("bfloat16", (3,), 4.5),
            "complex64": ("complex64", (3,), 4.5),
            "int32": ("int32", (3,), 3),
            "scalar": ("float32", (), 0.5),
            "empty": ("float32", (0, 2), 0.0),
        }


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("vmap", "vmap over a reduction"),
        ("vmap of jit", "vmap"),
        ("grad", "Differentiate first"),
        ("grad of grad", "Differentiate first"),
        ("grad of jit", "JVP"),
        ("nested", "one function at a time"),
        ("pmap", "pmap"),
        ("shard", "use 4 or 6"),
        ("integers", "real- or complex-valued"),
    ],
)
def test_what_cannot_be_reduced_is_refused(programs, what, says):
    for found in programs:
        assert says in found["refused"][what]
