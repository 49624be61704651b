"""Ways to read a pending parameter: each finishes it first, or finds no value.

One process: an owner that "finishes" by filling the parameter with ones stands in for
the overlap of a model, so a read that finishes nothing finds NaN.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import functional, graph
from torch.utils import checkpoint

from stretto.runtime.forward import raw_access
from stretto.runtime.forward.lazy import METADATA
from stretto.runtime.forward.member import BucketMember
from stretto.runtime.forward.pending import PendingParameter, guard, unguard
from stretto.runtime.forward.undisturbed import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")

EYE = torch.eye(4)


class Owner:
    """Finishes one parameter."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.full((4, 4), float("nan")))
        overlap: Any = self
        self.member = BucketMember(overlap, "weight", self.parameter, 0, 0, 0)
        self.finished = False
        assert guard(self.member, [])
        raw_access.watch(self)

    def touch(self, _member: BucketMember) -> None:
        unguard(self.member)
        if not self.finished:
            self.finished = True
            with undisturbed():
                self.parameter.fill_(1.0)

    def finish_all(self, *, keep_hooks: bool = False) -> None:
        self.touch(self.member)

    def finish_to_compile(self) -> None:
        self.touch(self.member)

    def close(self) -> None:
        raw_access.release(self)
        unguard(self.member)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _doubled(w: torch.Tensor) -> torch.Tensor:
    return w * 2


def _first(w: list[torch.Tensor]) -> torch.Tensor:
    return w[0] * 2


with warnings.catch_warnings():
    # A DeprecationWarning, or a FutureWarning from torch 2.14 on.
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(_doubled)
    SCRIPTED_LIST = torch.jit.script(_first)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Unasked(torch.Tensor):
    """A class that computes without asking any other."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _linear(p: nn.Parameter) -> nn.Linear:
    made = nn.Linear(4, 4, bias=False)
    made.weight = p
    return made


def _disabled(p: nn.Parameter) -> Any:
    with torch._C.DisableTorchFunction():
        return p * 2


def _data_of_another(p: nn.Parameter) -> Any:
    other = nn.Parameter(torch.zeros(4, 4))
    other.data = p
    return other * 1


def _saved(p: nn.Parameter) -> Any:
    file = io.BytesIO()
    torch.save([p], file)
    file.seek(0)
    return torch.load(file)[0]


def _written(p: nn.Parameter, write: Callable[[nn.Parameter], Any]) -> Any:
    with torch.no_grad():
        write(p)
    return p.detach().clone()


def _swapped(p: nn.Parameter) -> Any:
    other = nn.Parameter(torch.zeros(4, 4))
    torch.utils.swap_tensors(p, other)
    return [p.detach().clone(), other.detach().clone()]


def _without_grad(use: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], Any]:
    @torch.no_grad()
    def run(p: nn.Parameter) -> Any:
        return use(p)

    return run


_func = torch.func
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "operation": lambda p: p * 2,
    "method": lambda p: p.sum(),
    "index": lambda p: p[0],
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "numpy": lambda p: torch.tensor(p.detach().numpy().copy()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "list": lambda p: torch.tensor(p.tolist()),
    "text": lambda p: torch.tensor(float("nan") if "nan" in str(p) else 1.0),
    "tensor": lambda p: torch.tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p) * 1,
    "new_tensor": lambda p: EYE.new_tensor(p),
    "legacy constructor": _without_grad(lambda p: torch.Tensor(p) * 1),
    "Parameter": lambda p: nn.Parameter(p) * 1,
    "as_subclass": lambda p: p.as_subclass(torch.Tensor) * 1,
    "make_subclass": lambda p: torch.Tensor._make_subclass(nn.Parameter, p) * 1,
    "set_": _without_grad(lambda p: torch.zeros(4, 4).set_(p) * 1),
    "data of another": _data_of_another,
    "swap": _swapped,
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist()).sum(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "dlpack in C": lambda p: torch.from_dlpack(torch._C._to_dlpack(p)).clone(),
    "nested": lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0),
    "save": _saved,
    "pickle": lambda p: pickle.loads(pickle.dumps([p]))[0],
    "deepcopy": copy.deepcopy,
    "shared memory": _without_grad(lambda p: p.share_memory_() * 1),
    "vmap": lambda p: torch.vmap(lambda w: w * 2)(p),
    "vmap of a closure": lambda p: torch.vmap(lambda x: p @ x)(EYE),
    "grad": lambda p: _func.grad(lambda w: (w * w).sum())(p),
    "vjp": lambda p: _func.vjp(lambda w: w * w, p)[0],
    "jvp": lambda p: _func.jvp(lambda w: w * w, (p,), (EYE,)),
    "jacrev": lambda p: _func.jacrev(lambda w: w * w)(p),
    "functionalize": lambda p: _func.functionalize(lambda w: w * 2)(p),
    "functional_call": lambda p: _func.functional_call(
        nn.Linear(4, 4, bias=False), {"weight": p}, (EYE,)
    ),
    "stack_module_state": lambda p: _func.stack_module_state([_linear(p)])[0],
    "jacobian": lambda p: functional.jacobian(lambda w: w * w, p),
    "autograd.grad": lambda p: torch.autograd.grad((p * p).sum(), p),
    "gradient edge": lambda p: [graph.get_gradient_edge(p), p * 1][1],
    "Function": Double.apply,
    "checkpoint": lambda p: checkpoint.checkpoint(_doubled, p, use_reentrant=False),
    "scripted function": lambda p: SCRIPTED(p),
    "scripted function of a list": lambda p: SCRIPTED_LIST([p]),
    "traced module": lambda p: torch.jit.trace(_linear(p), (EYE,))(EYE),
    "scripted module": lambda p: torch.jit.script(_linear(p))(EYE),
    "torch.ops": lambda p: torch.ops.aten.mul.Tensor(p, EYE),
    "disabled": _disabled,
    "class that does not ask": lambda p: torch.ones(4, 4).as_subclass(Unasked) * p,
    "foreach": lambda p: torch._foreach_norm([p]),
    "write": lambda p: _written(p, lambda q: q.mul_(2)),
    "foreach write": lambda p: _written(p, lambda q: torch._foreach_add_([q], 1.0)),
    "init": lambda p: _written(p, lambda q: nn.init.constant_(q, 3.0)),
    "out": lambda p: _written(p, lambda q: torch.mul(EYE, 2, out=q)),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "norm": lambda p: nn.utils.get_total_norm([p]),
    "weight_norm": lambda p: nn.utils.parametrizations.weight_norm(_linear(p))(EYE),
    "average": lambda p: torch.optim.swa_utils.AveragedModel(_linear(p)).module.weight,
    "module.double": lambda p: _linear(p).double().weight * 1,
    "state_dict": lambda p: _linear(p).state_dict()["weight"].clone(),
}
"""What reads or writes a parameter's values."""

COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda p: [dist.all_reduce(p), p * 1],
    "broadcast": lambda p: [dist.broadcast(p, 0), p * 1],
    "process group": lambda p: [dist.group.WORLD.allreduce([p]).wait(), p * 1],  # type: ignore[union-attr]
    "reduce_scatter": lambda p: _reduced(p),
    "coalesced": lambda p: [
        dist._broadcast_coalesced(dist.group.WORLD, [p], 1000, 0),  # type: ignore[attr-defined]
        p * 1,
    ],
}


def _reduced(p: torch.Tensor) -> Any:
    out = torch.zeros(4, 4)
    dist.reduce_scatter(out, [p])
    return out


def values(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.detach()]
    if isinstance(found, dict):
        return values(list(found.values()))
    if isinstance(found, list | tuple):
        return [value for each in found for value in values(each)]
    return []


def assert_equal(found: Any, expected: Any) -> None:
    pairs = list(zip(values(found), values(expected), strict=True))
    assert pairs
    for got, wanted in pairs:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", READS)
def test_a_read_finds_the_updated_value(owner: Owner, name: str) -> None:
    expected = READS[name](nn.Parameter(torch.ones(4, 4)))
    assert_equal(READS[name](owner.parameter), expected)
    assert owner.finished


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_sends_the_updated_value(
    owner: Owner, group: None, name: str
) -> None:
    with torch.no_grad():
        expected = COLLECTIVES[name](nn.Parameter(torch.ones(4, 4)))
        assert_equal(COLLECTIVES[name](owner.parameter), expected)
    assert owner.finished


@pytest.mark.parametrize("use", [SCRIPTED, _disabled, Double.apply])
def test_gradients_of_an_unasked_read_are_the_parameter_s(
    owner: Owner, use: Any
) -> None:
    use(owner.parameter).sum().backward()
    assert owner.parameter.grad is not None
    assert torch.equal(owner.parameter.grad, torch.full((4, 4), 2.0))


def test_metadata_and_the_gradient_s_place_finish_nothing(owner: Owner) -> None:
    p = owner.parameter
    p.grad = torch.ones(4, 4)
    p.grad = None
    assert (p.shape, p.is_leaf, p.requires_grad, p.numel(), len(p)) == (
        (4, 4),
        True,
        True,
        16,
        4,
    )
    assert p.grad is None
    assert isinstance(p, nn.Parameter)
    assert not owner.finished
    assert torch.Tensor.size in METADATA


def test_a_finished_parameter_is_as_before(owner: Owner) -> None:
    owner.touch(owner.member)
    assert type(owner.parameter) is nn.Parameter
    assert owner.parameter.data_ptr() != 0
    owner.parameter.sum().backward()
    assert owner.parameter.grad is not None


def test_replaced_functions_are_put_back(owner: Owner) -> None:
    assert "data" in vars(torch.Tensor)
    owner.close()
    assert "data" not in vars(torch.Tensor)
    assert "_make_subclass" not in vars(torch.Tensor)
    assert type(torch._C._to_dlpack) is type(len)


def test_a_tensor_that_is_referred_to_weakly_keeps_working(owner: Owner) -> None:
    """The implementations can't be exchanged back; operators run on the own one."""
    import stretto.runtime.forward.pending as module

    swap, module._swap = module._swap, _refuse
    try:
        assert torch.equal((owner.parameter * 2).detach(), torch.full((4, 4), 2.0))
        copied = copy.deepcopy(owner.parameter)
        assert type(owner.parameter) is PendingParameter
    finally:
        module._swap = swap
    assert torch.equal(copied.detach(), torch.ones(4, 4))
    assert torch.equal(owner.parameter.detach(), torch.ones(4, 4))
    assert type(owner.parameter) is nn.Parameter


def _refuse(*_: Any) -> None:
    raise RuntimeError("Expected no weakrefs")
