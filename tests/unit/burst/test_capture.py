"""How often a model is recorded, and what captures must refuse or accept."""

from __future__ import annotations

import enum
import inspect
import random
import threading

import numpy as np
import pytest
import torch
from torch import from_numpy, nn
from torch.autograd import Variable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stretto.burst.graph import capture
from stretto.burst.tracing.recorder import FakeTensor
from stretto.errors import SpecError

CALLS: list[bool] = []
note = CALLS.append  # a method of a list is no state that a forward reads


class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        note(isinstance(x, FakeTensor))
        return self.layer(x)


def test_a_plain_model_is_recorded_once_for_each_number_of_samples():
    CALLS.clear()
    capture(Noted(), (torch.randn(2, 4),))
    # Its code runs again twice, to see that it can be compared. Real samples come
    # three times: with the module's own tensors, with others, and for `behavior`.
    assert CALLS == [True, True, True, True, False, False, False]


def test_parameters_that_share_memory_are_captured_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flat = torch.randn(32)
    model[0].weight.data = flat[:16].view(4, 4)
    model[1].weight.data = flat[16:].view(4, 4)
    graph = capture(model, (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["0", "1"]


class Shared(nn.Module):
    """Ends with a product by something that shares memory with its first weight."""

    def __init__(self, share):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        share(self, self.a.weight)

    def forward(self, x):
        h = self.c(self.b(self.a(x).tanh()).tanh())
        held = getattr(self, "_w", None)
        if isinstance(held, list):
            held = held[0]
        return h if held is None else h @ held.t()


def shares_a_weight(model, weight):
    model.b.weight.data = weight.data


def shares_with_a_hook(model, weight):
    last = weight.detach()
    model.c.register_forward_hook(lambda _module, _given, out: out @ last.t())


@pytest.mark.parametrize(
    "share",
    [
        lambda model, weight: model.register_buffer("_w", weight.detach()),
        lambda model, weight: model.register_buffer("_w", weight.detach()[:3]),
        lambda model, weight: setattr(model, "_w", weight.detach()[:3]),
        lambda model, weight: setattr(model, "_w", [weight.detach()[1:]]),
        lambda model, weight: setattr(model, "_w", nn.Parameter(weight.data[2:])),
        lambda model, weight: model.register_buffer(
            "_w", torch.from_numpy(weight.detach().numpy())
        ),
        shares_with_a_hook,
    ],
)
def test_what_shares_a_parameters_memory_is_in_its_layer(share):
    graph = capture(Shared(share), (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["a"]


def test_parameters_that_overlap_are_in_one_layer():
    graph = capture(Shared(shares_a_weight), (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["a", "c"]


class ReadsMean(nn.Module):
    """Reads a view of statistics that a norm in another layer updates."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("mean", self.norm.running_mean.view(1, 4))

    def forward(self, x):
        return self.b(self.norm(self.a(x)).tanh()) + self.mean


def test_what_shares_memory_with_running_statistics_is_in_the_norms_layer():
    graph = capture(ReadsMean(), (torch.randn(4, 4),))
    of = {name: node.name for node in graph.nodes for name in node.buffer_names}
    assert of["mean"] == of["norm.running_mean"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_view_of_a_parameter_that_needs_a_gradient_is_refused():
    model = Shared(lambda model, weight: setattr(model, "_w", weight[:3]))
    with pytest.raises(SpecError, match="'_w' needs a gradient but is not a parameter"):
        capture(model, (torch.randn(2, 4),))


class Hidden(nn.Module):
    """Reads a module or a parameter that it does not register."""

    def __init__(self, held, *, grad=True):
        super().__init__()
        self.a, self.b, self.held, self.grad = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            held,
            grad,
        )

    def forward(self, x):
        x = self.a(x)
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            part = self.held["part"]
            more = part(x) if isinstance(part, nn.Module) else x * part
        return self.b(x + more)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: _weight()])
@pytest.mark.parametrize("is_hooked", [False, True], ids=["plain", "hooked"])
def test_a_parameter_that_is_not_registered_is_refused(make, is_hooked):
    part = make()
    model = nn.Sequential(Hidden({"part": part}))
    if is_hooked:
        model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(SpecError, match="not a parameter of the model: register it"):
        capture(model, (torch.randn(2, 4),))
    held = part.parameters() if isinstance(part, nn.Module) else [part]
    assert all(p.grad is None for p in held)


def _weight():
    return nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("kind", ["frozen", "no_grad"])
def test_a_parameter_of_a_container_that_needs_no_gradient_is_read(kind):
    model = Hidden({"part": nn.Linear(4, 4)}, grad=kind != "no_grad")
    if kind == "frozen":
        model.held["part"].requires_grad_(False)
    graph = capture(model, (torch.randn(2, 4),))
    assert len(graph.nodes) > 0


def test_ranks_that_do_not_run_its_layer_have_the_same_operations():
    def share(model, weight):
        model._w = weight.detach()[:3]

    model, x = Shared(share), torch.randn(2, 4)
    before = capture(model, (x,)).semantics
    with torch.no_grad():
        model.a.weight.add_(1)
    assert capture(model, (x,)).semantics == before


class NormOfTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return self.a(x) @ self.norm(self.table).t()


def test_a_norm_of_a_table_is_state_of_its_layer_and_not_over_samples():
    nodes = capture(NormOfTable(), (torch.randn(2, 4),)).nodes
    assert any(node.keeps_state for node in nodes)
    assert not any(node.has_batch_norm for node in nodes)


class Held(nn.Module):
    """Calls a module of each name."""

    def __init__(self, *names, function=None):
        super().__init__()
        self.a, self.function = nn.Linear(4, 4), function
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        h = self.a(x)
        h = h if self.function is None else self.function(h)
        for name, part in self.parts.items():
            h = getattr(self, name)(part(h).tanh()) + x
        return h


@pytest.mark.parametrize(
    "name", ["global", "in", "class", "lambda", 'a "b"', "a\\b", "a\nb", "{a}", "é😀"]
)
def test_parts_keep_names_that_code_can_not_write_after_a_dot(name):
    graph = capture(Held(name), (torch.randn(2, 4),))
    assert {f"parts.{name}", name} <= {node.name for node in graph.nodes}
    kept = {name for node in graph.nodes for name in node.parameter_names}
    assert kept == {key for key, _ in Held(name).named_parameters()}


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("stem_of_input", None),
        ("constant_0", lambda h: h * ONES),
        *((f"dropout_{i}", functional.dropout) for i in range(3)),
    ],
)
def test_names_that_capture_makes_are_not_those_of_the_model(name, function):
    graph = capture(Held(name, function=function), (torch.randn(2, 4),))
    kept = {name for node in graph.nodes for name in node.parameter_names}
    assert {f"{name}.weight", f"parts.{name}.weight"} <= kept


class Column(enum.IntEnum):
    LAST = 1


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h / np.sqrt(4),
        lambda h: h * np.float32(2),
        lambda h: h + np.int64(2),
        lambda h: h.softmax(np.int64(1)),
        lambda h: h[:, : np.int64(4)],
        lambda h: h * torch.tensor(np.float64(2)).to(h),
        lambda h: h.softmax(Column.LAST),
    ],
)
def test_numbers_of_numpy_and_of_other_classes_are_captured(function):
    graph = capture(Between(function), (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["before", "after"]


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.view(np.int64(h.shape[0]), 2, 2).flatten(1),
        lambda h: h.reshape(np.prod(h.shape[:1]), -1),
        lambda h: h[: np.int32(h.shape[0])],
        lambda h: h + torch.zeros(np.int64(h.shape[0]), 4),
        lambda h: h * np.maximum(1, np.int64(2)),
    ],
)
def test_numbers_of_numpy_may_follow_the_batch(function):
    graph = capture(Between(function), (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["before", "after"]


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h / np.sqrt(h.shape[0]),
        lambda h: h * np.int64(h.shape[0]),
        lambda h: h + np.float32(h.shape[0]),
    ],
)
def test_numbers_of_numpy_that_mix_samples_are_refused(function):
    with pytest.raises(SpecError, match="number of samples"):
        capture(Between(function), (torch.randn(2, 4),))


def a_table():
    return torch.from_numpy(np.arange(4.0)).float()


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h + Variable(a_table()).view(1, 4).repeat(h.shape[0], 1),
        lambda h: h + Variable(torch.zeros_like(h), requires_grad=True),
        lambda h: h + Variable(h),
    ],
)
def test_variables_of_early_versions_are_captured(function):
    graph = capture(Between(function), (torch.randn(2, 4),))
    names = [node.name for node in graph.nodes]
    assert (names[0], names[-1]) == ("before", "after")
    assert isinstance(Variable(torch.ones(2)), torch.Tensor)


class Converting(nn.Module):
    def __init__(self, convert):
        super().__init__()
        self.rows = nn.GRU(4, 4, batch_first=True)
        self.after = nn.Linear(4, 4)
        self.convert = convert

    def forward(self, x):
        self.convert(self, x)
        return self.after(self.rows(x[:, None])[0][:, 0])


@pytest.mark.parametrize(
    "convert",
    [
        lambda m, x: m.to(x.device),
        lambda m, x: m.rows.to(x),
        lambda m, _: (m.float(), m.rows.cpu(), m.after.type(torch.float32)),
    ],
)
def test_conversions_that_change_nothing_are_captured(convert):
    model = Converting(convert)
    graph = capture(model, (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["rows", "after"]
    model(torch.randn(2, 4))  # with its own parameters again


def test_a_conversion_in_forward_is_refused_with_its_line():
    model = Converting(lambda m, _: m.after.double())
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: converts 'weight' of a"):
        capture(model, (torch.randn(2, 4),))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True)
        self.parts = nn.TransformerEncoder(layer, 1)
        self.after = nn.Linear(4, 4)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.after(self.parts(x, mask=mask))


def test_masks_that_torch_compares_with_the_causal_one_are_captured():
    graph = capture(Masked(), (torch.randn(2, 3, 4),))
    assert [node.name for node in graph.nodes] == ["parts", "after"]


def test_the_refusal_of_a_functional_batch_norm_names_a_module():
    model = Between(lambda h: functional.batch_norm(h, None, None, training=True))
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*a torch.nn module"):
        capture(model, (torch.randn(2, 4),))


def late_half(h):
    return h.masked_fill((torch.arange(h.shape[0]) >= 6)[:, None], 0.0)


def late_thousands(h):
    return h.masked_fill((torch.arange(h.shape[0]) >= 600)[:, None], 0.0)


def by_group(h):
    return h * (torch.arange(h.shape[0]) // 5)[:, None]


def by_count_of_ones(h):
    return h * (torch.ones(h.shape[0]).cumsum(0) > 6)[:, None]


def table_by_place(h):
    return h + torch.linspace(0, 1, 4000).square()[: h.shape[0], None]


def adds_the_place(h):
    return h + torch.arange(h.shape[0])[:, None]


def looks_six_rows_away(h):
    weight = torch.ones(4, 4, 3, dtype=h.dtype)
    return functional.conv1d(h.t()[None], weight, padding=6, dilation=6)[0].t()


def rolls(h):
    return h.roll(5, 0)


def even_numbers(h):
    return h * 2 if h.shape[0] % 2 == 0 else h


def first_row_filled(h):
    return h.index_fill(0, torch.tensor([6]), 0.0)


def first_1500(h):
    return h[:1500]


def large_batches(h):
    return h * 2 if h.shape[0] > 2000 else h


def sixty_four(h):
    return h * 2 if h.shape[0] == 64 else h


def as_many_as_there_are(h):
    return h[: h.shape[0]] + h[-h.shape[0] :] + h.narrow(0, 0, h.shape[0])


def picks_by_place(h):
    return h[torch.arange(h.shape[0]), h.argmax(1)][:, None] * h


def picks_from_flat(h):
    index = h.argmax(1) + torch.arange(h.shape[0]) * h.shape[1]
    return h.reshape(-1)[index][:, None] * h


def small_batches(h):
    return h.exp() if h.shape[0] < 6 else h


def rows_of_zeros(h):
    return torch.cat([h, h.new_zeros(h.shape[0], 4)], 1)[:, :4]


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.after(self.function(self.before(x)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (late_half, "'getitem' depends on a sample's place"),
        (late_thousands, "depends on a sample's place"),
        (by_group, "depends on a sample's place"),
        (by_count_of_ones, "depends on a sample's place"),
        (table_by_place, "depends on a sample's place"),
        (adds_the_place, "'add' depends on a sample's place"),
        (looks_six_rows_away, "mixes samples"),
        (rolls, "'roll' mixes samples"),
        (even_numbers, "depends on the number of samples"),
        (small_batches, "depends on the number of samples"),
        (first_row_filled, "index 6 is out of bounds"),
    ],
)
def test_what_differs_by_place_or_number_is_refused_with_its_line(function, message):
    with pytest.raises(SpecError, match=message) as caught:
        capture(Between(function), (torch.randn(3, 4),))
    assert "test_capture.py:" in str(caught.value)


@pytest.mark.parametrize("function", [first_1500, large_batches, sixty_four])
def test_numbers_of_samples_are_recorded_when_they_come(function):
    graph = capture(Between(function), (torch.randn(3, 4),))
    graph.require_count(9)
    count = 64 if function is sixty_four else 4096
    with pytest.raises(SpecError, match=r"test_capture.py:.*(number|not a multiple)"):
        graph.require_count(count)


def test_each_number_of_samples_is_recorded_once():
    graph = capture(Noted(), (torch.randn(2, 4),))
    CALLS.clear()
    for count in (*range(10, 40), 2000, *range(10, 40), 2000):
        graph.require_count(count)
    assert len(CALLS) == 31


@pytest.mark.parametrize(
    "function",
    [as_many_as_there_are, picks_by_place, picks_from_flat, rows_of_zeros],
)
def test_what_counts_the_samples_and_treats_them_equally_is_captured(function):
    model = Between(function)
    graph = capture(model, (torch.randn(3, 4),))
    graph.require_count(5)
    x = torch.randn(5, 4)
    values = {"input": x}
    for node in graph.nodes:
        values[node.name] = node.module(*[values[name] for name in node.inputs])
    torch.testing.assert_close(values[graph.output], model(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_look_at_the_whole_batch_are_refused(kind, option):
    options = option if kind is nn.Embedding else {**option, "mode": "sum"}
    model = nn.Sequential(kind(10, 4, **options), nn.Flatten(), nn.ReLU())
    words = torch.randint(0, 10, (3, 4))
    message = "max_norm" if "max_norm" in option else "scale_grad_by_freq"
    with pytest.raises(SpecError, match=message):
        capture(model, (words,))


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        one, two = self.one(x), self.two(x)
        logits = one @ two.t()
        return one, two, logits


def test_similarities_between_samples_are_refused_where_they_are_computed():
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: 'matmul' compares each"):
        capture(Contrastive(), (torch.randn(3, 4),))


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.own = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.inference_mode():
            target = self.teacher(x)
        return self.own(x) - target


def test_inference_mode_in_forward_is_refused_with_the_way_out():
    with pytest.raises(SpecError, match=r"inference_mode\(\) .*use torch.no_grad\(\)"):
        capture(Taught(), (torch.randn(3, 4),))


def in_another_default_dtype(h):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return h + torch.full((4,), 0.1)
    finally:
        torch.set_default_dtype(usual)


def test_another_default_dtype_in_forward_is_refused_with_its_line():
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*set_default_dtype"):
        capture(Between(in_another_default_dtype), (torch.randn(3, 4),))


def from_parts(h):
    made = torch.empty(h.shape[0], 4)
    made[:, :2], made[:, 2:] = h[:, 2:], h[:, :2]
    return made


def of_arrays(h):
    return h * torch.from_numpy(np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    "function",
    [
        from_parts,
        of_arrays,
        lambda h: h * from_numpy(np.arange(4, dtype=np.float32)),
        lambda h: h * torch.FloatTensor([1, 2, 3, 4]),
        lambda h: h[:, torch.LongTensor([1, 0, 3, 2])],
        lambda h: h * torch.Tensor([1, 2, 3, 4]).view(1, 4),
        lambda h: h + h.new(4).fill_(2.0),
        lambda h: h + h.new(h.shape[0], 4).zero_(),
        lambda h: h + h.new(h.size()).fill_(1.0),
        lambda h: h * h.new([1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_tensors_made_in_older_ways_are_captured(function):
    model, x = Between(function), torch.randn(5, 4)
    graph = capture(model, (x,))
    values = {"input": x}
    for node in graph.nodes:
        values[node.name] = node.module(*[values[name] for name in node.inputs])
    torch.testing.assert_close(values[graph.output], model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * torch.binomial(torch.full_like(h, 3.0), torch.full_like(h, 0.5)),
        lambda h: h * torch.distributions.Binomial(3, torch.full_like(h, 0.5)).sample(),
        lambda h: torch.native_dropout(h, 0.5, train=True)[0],
        lambda h: torch.alpha_dropout(h, 0.5, train=True),
        lambda h: torch.rrelu(h, training=True),
        lambda h: h * h.detach().sigmoid().bernoulli(),
        lambda h: h * (h.new(h.shape[0], 1).uniform_() < 0.8),
    ],
)
def test_draws_for_each_sample_are_captured(function):
    capture(Between(function), (torch.randn(3, 4),))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * (n := torch.rand(len(h), 4)) / n.max(),
        lambda h: h + torch.randn(len(h), 4)[:1],
        lambda h: h + torch.randn(len(h), 4).mean(0),
        lambda h: h * (torch.rand(len(h), 1) > 0.5).any(),
    ],
)
def test_what_is_computed_from_all_samples_draws_is_refused(function):
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*all samples share"):
        capture(Between(function), (torch.randn(3, 4),))


def test_numbers_drawn_together_for_all_samples_are_refused():
    def weighted(h):
        return h * torch.distributions.Dirichlet(torch.ones(len(h))).sample()[:, None]

    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*sample_dirichlet"):
        capture(Between(weighted), (torch.randn(3, 4),))


def _in_fork(h):
    with torch.random.fork_rng():
        noise = torch.rand_like(h)
    return h * noise


def _again(h):
    state = torch.get_rng_state()
    first = torch.dropout(h, 0.5, train=True)
    torch.set_rng_state(state)
    return first + torch.dropout(h, 0.5, train=True)


@pytest.mark.parametrize("function", [_in_fork, _again])
def test_a_forward_that_restores_the_generators_state_is_refused(function):
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*a state of the gen"):
        capture(Between(function), (torch.randn(3, 4),))


@pytest.mark.parametrize(
    "reads", [lambda h: h.is_contiguous(), lambda h: h.stride(-1) == 1]
)
def test_an_input_that_is_not_contiguous_is_refused_where_forward_asks(reads):
    class Asks(Between):
        def forward(self, x):
            h = self.before(x)
            return self.after(h if reads(x) else -h)

    x = torch.randn(3, 4)
    graph = capture(Asks(None), (x,))
    graph.require_layout_known([x])
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*x.contiguous\(\)"):
        graph.require_layout_known([x.t().contiguous().t()])


def test_an_input_may_lie_in_any_way_where_forward_does_not_ask():
    graph = capture(Between(torch.relu), (torch.randn(3, 4),))
    graph.require_layout_known([torch.randn(4, 3).t()])


class Reentrant(Between):
    def forward(self, x):
        h = checkpoint(self.before, x, use_reentrant=True)
        return self.after(h.tanh())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_that_gives_no_gradient_is_refused_with_the_reason():
    model = Reentrant(None)
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*use_reentrant=False"):
        capture(model, (torch.randn(3, 4),))
    model.before.requires_grad_(requires_grad=False)
    capture(model, (torch.randn(3, 4),))


class Scaled(nn.Module):
    """Reads a tensor of its own, and one that no module holds."""

    def __init__(self, name):
        super().__init__()
        self.a, self.b, self.name = nn.Linear(4, 4), nn.Linear(4, 4), name
        setattr(self, name, torch.full((4,), 3.0))

    def forward(self, x):
        return self.b(self.a(x).tanh() * ONES) * getattr(self, self.name)


@pytest.mark.parametrize(
    "name", ["constant_0", "constant_0_", "dropout_0", "value_0", "size", "batch"]
)
def test_a_tensor_of_the_model_may_have_a_name_that_capture_makes(name):
    model, x = Scaled(name), torch.randn(3, 4)
    graph = capture(model, (x,))
    values = {"input": x}
    for node in graph.nodes:
        values[node.name] = node.module(*[values[name] for name in node.inputs])
    torch.testing.assert_close(values[graph.output], model(x), rtol=0, atol=0)


class Borrows(nn.Module):
    """A hook of one module reads another module's parameter through that module."""

    def __init__(self, register, *, calls=True):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = calls
        register(self)

    def forward(self, x):
        h = self.a(x).tanh()
        h = self.b(h).tanh() if self.calls else h
        return self.c(h)


def behind_the_forward(model):
    other = model.b
    model.a.register_forward_hook(lambda _module, _args, out: out @ other.weight.t())


def before_the_forward(model):
    model.c.register_forward_pre_hook(
        lambda _module, args: (args[0] * model.a.bias.square(),)
    )


@pytest.mark.parametrize(
    ("register", "layers"),
    [(behind_the_forward, ["a", "c"]), (before_the_forward, ["a"])],
)
def test_a_hook_that_reads_another_modules_parameter_is_in_its_layer(register, layers):
    graph = capture(Borrows(register), (torch.randn(3, 4),))
    assert [node.name for node in graph.nodes] == layers


def test_a_hook_that_reads_a_parameter_of_a_module_that_is_not_called_is_refused():
    model = Borrows(behind_the_forward, calls=False)
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*'b.weight'"):
        capture(model, (torch.randn(3, 4),))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda h: h + torch.FloatTensor([len(h)]), "depends on the number of samples"),
        (lambda h: h * torch.FloatTensor(4), "FloatTensor.* torch.empty"),
        (lambda h: h * torch.FloatTensor([1.0] * 4).mul_(2), "clone()"),
    ],
)
def test_constructors_whose_values_are_unknown_are_refused(function, message):
    with pytest.raises(SpecError, match=rf"test_capture.py:\d+: .*{message}"):
        capture(Between(function), (torch.randn(3, 4),))


def compiled_whole(model):
    return torch.compile(model, backend="eager")


def compiled_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled_by_its_method(model):
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled", [compiled_whole, compiled_part, compiled_by_its_method]
)
def test_a_compiled_module_is_refused_by_name(compiled):
    model = compiled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    for _ in range(4):  # each time in the same words
        with pytest.raises(SpecError, match=r"was compiled by torch\.compile"):
            capture(model, (torch.randn(2, 3),))


class DrawsWithoutTorch(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(3, 3), draw

    def forward(self, x):
        h = self.linear(x)
        return h * self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand])  # noqa: TID251
def test_random_numbers_without_torch_name_the_users_line(draw):
    line = inspect.getsourcelines(DrawsWithoutTorch.forward)[1] + 2
    with pytest.raises(SpecError, match=rf"test_capture\.py:{line}: forward draws"):
        capture(DrawsWithoutTorch(draw), (torch.randn(2, 3),))


class Calls(nn.Module):
    """Calls a function with itself and its input."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    "squeeze",
    [
        lambda h: h.squeeze(),
        torch.squeeze,
        lambda h: h[None, :, None].squeeze(),
        lambda h: h.unsqueeze(0).squeeze(0).squeeze(),
    ],
)
def test_squeeze_without_dimensions_keeps_a_rank_with_one_sample(squeeze):
    graph = capture(
        Calls(lambda model, x: squeeze(model.last(model.first(x).tanh()))),
        (torch.randn(6, 4),),
    )
    value = torch.randn(1, 4)
    for node in graph.nodes:
        value = node.module(value)
    assert value.shape == (1,)


def test_squeeze_without_dimensions_is_refused_for_one_sample_in_all():
    graph = capture(
        Calls(lambda model, x: model.last(x).squeeze()), (torch.randn(6, 4),)
    )
    graph.require_count(2)
    with pytest.raises(SpecError, match=r"test_capture\.py:\d+: gives .* \(\) for 1"):
        graph.require_count(1)


def test_a_tensor_of_which_only_the_type_is_read_is_no_layer():
    def function(model, x):
        both = torch.cat([model.first(x), x], 1)
        scale = torch.linspace(0, 1, 4).type_as(both[:, 1:])
        return model.last(both[:, :4] * scale)

    graph = capture(Calls(function), (torch.randn(6, 4),))
    assert "getitem" not in [node.name for node in graph.nodes]


@pytest.mark.parametrize("is_by_call", [True, False])
def test_forward_that_changes_a_mode_is_refused(is_by_call):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            if is_by_call:
                self.norm.eval()
            else:
                self.norm.training = False
            return self.norm(x)

    model = Model()
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: changes the mode"):
        capture(model, (torch.randn(4, 3),))
    assert model.norm.training
    model.norm.eval()
    capture(model, (torch.randn(4, 3),))


@pytest.mark.parametrize("way", ["zero_grad", "read", "set"])
def test_forward_that_uses_gradients_is_refused(way):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            if way == "zero_grad":
                self.linear.zero_grad()
            elif way == "set":
                self.linear.weight.grad = None
            elif self.linear.weight.grad is not None:
                x = x + 1
            return self.linear(x)

    with pytest.raises(SpecError, match=r"test_capture.py:\d+: .*grad"):
        capture(Model(), (torch.randn(4, 3),))


@pytest.mark.parametrize(
    ("name", "setting", "value"), [("drop", "p", 0.5), ("norm", "momentum", 0.5)]
)
def test_forward_that_changes_a_setting_is_refused(name, setting, value):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            setattr(getattr(self, name), setting, value)
            return self.drop(self.norm(x))

    model = Model()
    with pytest.raises(
        SpecError, match=rf"test_capture.py:\d+: changes '{setting}' of"
    ):
        capture(model, (torch.randn(4, 3),))
    setattr(getattr(model, name), setting, value)
    capture(model, (torch.randn(4, 3),))


@pytest.mark.parametrize(
    "write",
    [
        lambda norm: vars(norm).update(training=False),
        lambda norm: object.__setattr__(norm, "training", False),
        lambda norm: norm.__dict__.__setitem__("momentum", 0.5),
        lambda norm: setattr(norm, "__dict__", {**vars(norm), "training": False}),
    ],
)
@pytest.mark.parametrize("is_undone", [False, True])
def test_a_setting_changed_through_the_dictionary_is_refused(write, is_undone):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            before = dict(vars(self.norm))
            write(self.norm)
            result = self.norm(x)
            if is_undone:
                vars(self.norm).update(before)
            return result

    model = Model()
    with pytest.raises(SpecError, match=r"test_capture.py:\d+: changes .* in forward"):
        capture(model, (torch.randn(4, 3),))
    assert model.norm.training


class Meanwhile(nn.Module):
    """Lets another thread use modules and functions while it is recorded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if isinstance(x, FakeTensor):
            thread = threading.Thread(target=_use_another_model)
            thread.start()
            thread.join(10)
        return self.layer(x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


OTHERS: list[object] = []
keep = OTHERS.append


def _use_another_model():
    other = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    try:
        other.eval()
        with torch.autocast("cpu", torch.bfloat16):
            other(torch.ones(1, 2))
        other.zero_grad()
        keep(Twice.apply(torch.ones(1)).item())
    except Exception as exc:  # noqa: BLE001
        keep(exc)


def test_other_threads_use_modules_and_functions_while_a_model_is_captured():
    OTHERS.clear()
    capture(Meanwhile(), (torch.randn(2, 4),))
    assert OTHERS
    assert set(OTHERS) == {2.0}
