"""A refusal says what is true of the line, and what to write in its place."""

from __future__ import annotations

import contextvars

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

from stretto.burst.graph import capture
from stretto.errors import SpecError


class Net(nn.Module):
    """Computes what a test gives between two layers."""

    def __init__(self, between, **parts):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x, *more):
        return self.two(self.between(self, self.one(x), *more))


def refusal(between, *more, shape=(6, 4), **parts):
    with pytest.raises(SpecError) as raised:
        capture(Net(between, **parts), (torch.randn(shape), *more))
    return str(raised.value)


def packed(net, h, lengths):
    given = rnn.pack_padded_sequence(h, lengths.cpu(), batch_first=True)
    return rnn.pad_packed_sequence(net.rnn(given)[0], batch_first=True)[0]


def last_steps(net, h, lengths):
    out = net.rnn(h)[0]
    return out.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, out.size(2)))


def test_packed_sequences_have_a_way_that_is_captured():
    recurrent, lengths = nn.GRU(4, 4, batch_first=True), torch.arange(6, 0, -1)
    message = refusal(packed, lengths, shape=(6, 6, 4), rnn=recurrent)
    assert "out.gather(1, (lengths - 1).view(-1, 1, 1)" in message
    capture(Net(last_steps, rnn=recurrent), (torch.randn(6, 6, 4), lengths))


def unused(net, h):
    net.norm(h)
    return h


def test_an_unused_batch_norm_has_a_way_that_is_captured():
    norm = nn.BatchNorm1d(4)
    assert "set track_running_stats = False of 'norm'" in refusal(unused, norm=norm)
    norm.track_running_stats = False
    capture(Net(unused, norm=norm), (torch.randn(6, 4),))


def counted(net, h):
    net.norm.num_batches_tracked += 1
    return h


def averaged(net, h):
    net.norm.running_mean.copy_(h.detach().mean())
    return h


@pytest.mark.parametrize("between", [counted, averaged])
def test_a_written_buffer_is_said_to_follow_samples_only_if_it_does(between):
    message = refusal(between, norm=nn.BatchNorm1d(4))
    assert "writes into the parameter or buffer 'norm." in message
    assert "Update it in the training loop" in message
    assert ("computed from samples" in message) is (between is averaged)


def relu_by_name(net, h):
    return functional.relu_(input=h)


def constant_by_name(net, h):
    return h + nn.init.constant_(tensor=torch.empty(len(h), 4), val=2.0)


@pytest.mark.parametrize("between", [relu_by_name, constant_by_name])
def test_an_argument_that_is_written_may_have_a_name(between):
    net = Net(between)
    graph = capture(net, (torch.randn(6, 4),))
    assert {node.name for node in graph.nodes} == {"one", "two"}


def into_out(net, h):
    made = torch.empty(len(h), 4)
    torch.add(h.detach(), 1, out=made)
    return h + made


def drawn_into(net, h):
    return h + nn.init.normal_(torch.empty(len(h), 4))


@pytest.mark.parametrize(
    ("between", "name"), [(into_out, "out"), (drawn_into, "tensor")]
)
def test_the_written_argument_is_called_by_its_name(between, name):
    assert f"writes into the tensor {name}=" in refusal(between)


def selected(net, h):
    return h + h[(h > 0).byte()].sum()


def written_where(net, h):
    h = h.clone()
    h[(h > 0).byte()] = 0.0
    return h


@pytest.mark.filterwarnings("ignore:indexing with dtype")
@pytest.mark.parametrize("between", [selected, written_where])
def test_a_mask_of_bytes_is_named(between):
    assert "mask.bool()" in refusal(between)


def kept(net, h):
    net.features = h
    return h


def test_a_kept_tensor_has_a_way():
    assert "use a local variable" in refusal(kept)


def turned(net, h):
    return net.part(h.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("part", "way"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8), "with batch_first=True"),
        (nn.Dropout(0.5, inplace=True), "with inplace=False"),
    ],
)
def test_a_dropout_beside_the_batch_has_the_way_of_its_module(part, way):
    message = refusal(turned, shape=(6, 5, 4), part=part)
    assert f"Create {type(part).__name__} {way}" in message


class NoGradient(torch.autograd.Function):
    """Gives no gradient, not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return None


def without_gradient(net, h):
    return h + NoGradient.apply(net.norm(h))


def test_a_batch_norm_may_get_no_gradient():
    capture(Net(without_gradient, norm=nn.BatchNorm1d(4)), (torch.randn(6, 4),))


def in_a_checkpoint(net, h):
    return checkpoint(lambda x: net.drop(net.two(x)), h, use_reentrant=False)


class Checkpointed(nn.Module):
    """Runs its dropout in a checkpoint of its own."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, h):
        return checkpoint(self.drop, h, use_reentrant=False)


class Encoder(nn.Module):
    """One of PyTorch's modules with dropout."""

    def __init__(self):
        super().__init__()
        self.part = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)

    def forward(self, h):
        return self.part(h[:, None])[:, 0]


def within_one_operation(net, h):
    return net.part(h)


def drops_in_a_checkpoint(_net, h):
    return checkpoint(lambda x: functional.dropout(x, 0.5), h, use_reentrant=False)


def test_a_dropout_in_a_checkpoint_has_a_way_that_is_captured():
    part = Checkpointed()
    part.register_forward_hook(lambda *_: None)  # so it is one operation
    message = refusal(within_one_operation, part=part)
    assert "call torch.nn.functional.dropout there" in message
    capture(Net(within_one_operation, part=Checkpointed()), (torch.randn(6, 4),))
    capture(Net(in_a_checkpoint, drop=nn.Dropout(0.5)), (torch.randn(6, 4),))
    capture(Net(in_a_checkpoint, drop=Encoder()), (torch.randn(6, 4),))
    capture(Net(drops_in_a_checkpoint), (torch.randn(6, 4),))


def normed_in_a_cache(net, h):
    with parametrize.cached():
        return net.normed(net.normed(h))


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_a_cache_changes_names_the_cache(seed):
    torch.manual_seed(seed)  # of some, the gradients differ little
    normed = parametrizations.spectral_norm(nn.Linear(4, 4))
    message = refusal(normed_in_a_cache, normed=normed)
    assert "test_ways_out.py" in message
    assert "within torch.nn.utils.parametrize.cached(), leave that out" in message
    capture(Net(lambda net, h: net.normed(net.normed(h)), normed=normed), (X,))


def test_complex_outputs_beside_real_ones_are_to_be_given_as_real_ones():
    class Both(nn.Linear):
        def forward(self, x):
            return super().forward(x), torch.fft.fft(x)

    with pytest.raises(SpecError, match=r"give complex ones as torch.view_as_real"):
        capture(Both(4, 4), (X,))


@pytest.mark.parametrize(
    ("model", "example", "type_"),
    [
        (nn.Embedding(9, 4), torch.rand(6, 5), "float32"),
        (nn.Linear(4, 4), torch.ones(6, 4).long(), "int64"),
        (nn.Conv1d(4, 4, 1), torch.ones(6, 4, 4).byte(), "uint8"),
    ],
)
def test_a_wrong_type_of_the_example_is_named(model, example, type_):
    with pytest.raises(SpecError) as raised:
        capture(nn.Sequential(model, nn.Tanh()), (example,))
    assert f"The example inputs have type torch.{type_}: if" in str(raised.value)
    assert "needs a tensor's value" not in str(raised.value)


def test_a_squeeze_of_one_sample_is_named():
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze()

    with pytest.raises(SpecError, match=r"Name the dimension to drop, as in squeeze"):
        capture(Flat(4, 1), (X,)).require_count(1)


class SignOfSum(torch.autograd.Function):
    """Its gradient of a parameter is no sum over samples."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), (x.t() @ grad).sign()


def with_a_sign(net, h):
    h = h.tanh()
    return SignOfSum.apply(h, net.weight)


def test_a_backward_that_mixes_samples_is_named_by_its_own_line():
    message = refusal(with_a_sign, weight=nn.Parameter(torch.randn(4, 4)))
    line = with_a_sign.__code__.co_firstlineno + 2
    assert message.startswith(f"{__file__}:{line}: layer 'one': it mixes samples in")


def by_offsets(net, i):
    return net.bag(i.flatten(), torch.arange(0, i.numel(), i.shape[1]))


def by_given_offsets(net, i):
    return net.bag(i[:, 0], i[:, 1])


def by_functional_offsets(net, i):
    weight = net.bag.weight
    return functional.embedding_bag(i.flatten(), weight, torch.arange(len(i)) * 2)


@pytest.mark.parametrize(
    "between", [by_offsets, by_given_offsets, by_functional_offsets]
)
def test_offsets_of_an_embedding_bag_have_a_way_that_is_captured(between):
    class Bag(Net):
        def forward(self, i):
            return self.two(self.between(self, i))

    bag, example = nn.EmbeddingBag(9, 4), torch.arange(12).view(6, 2) % 9
    with pytest.raises(SpecError) as raised:
        capture(Bag(between, bag=bag), (example,))
    line = between.__code__.co_firstlineno + 1 + (between is by_functional_offsets)
    assert str(raised.value).startswith(f"{__file__}:{line}: ")
    assert "one row of indices for each sample and no offsets" in str(raised.value)
    capture(Bag(lambda net, i: net.bag(i), bag=bag), (example,))


def slope(net, h):
    return torch.func.grad(lambda x: net.two(x).tanh().sum())(h)


def test_a_transform_within_forward_is_named():
    assert "torch.func.grad and its like can't be recorded" in refusal(slope)


X = torch.randn(6, 4)


COUNT = contextvars.ContextVar("count", default=0)


def counted(_net, h):
    COUNT.set(COUNT.get() + 1)
    return h * 2 if COUNT.get() > 5 else h


def test_a_count_in_a_context_variable_is_named():
    words = refusal(counted)
    assert "test_ways_out.py" in words
    assert "changes the context variable 'count' in each call" in words


@pytest.mark.parametrize(
    "read",
    [
        lambda h: torch.from_dlpack(h),
        lambda h: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h)),
        lambda h: torch.from_numpy(np.from_dlpack(h)),
    ],
)
def test_memory_that_is_read_by_its_address_is_refused(read):
    words = refusal(lambda _net, h: h + read(h.detach()))
    assert "test_ways_out.py" in words
    assert "Its memory is read outside of PyTorch's operations" in words


@pytest.mark.parametrize(
    "asks", [lambda _: torch.is_inference_mode_enabled(), lambda h: h.is_inference()]
)
def test_inference_mode_is_not_asked_for(asks):
    words = refusal(lambda _net, h: h * 2 if asks(h) else h)
    assert "test_ways_out.py" in words
    assert "asks for inference mode" in words


def test_an_error_that_names_an_argument_dtype_is_not_one_of_types():
    words = refusal(lambda net, h: net.two(h, dtype=h.dtype))
    assert "unexpected keyword argument 'dtype'" in words
    assert "tensors of that type" not in words


def test_an_error_that_forward_raises_is_named_as_its_own():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            if x.shape[1] == 4:
                raise ValueError("bad width")
            return self.layer(x)

    with pytest.raises(SpecError, match="raises ValueError: bad width"):
        capture(Raises(), (torch.randn(2, 4),))


class Recurrent(nn.Module):
    def __init__(self, *, samples_first):
        super().__init__()
        self.rnn, self.samples_first = nn.GRU(4, 3, 2, batch_first=True), samples_first

    def forward(self, x, state):
        if not self.samples_first:
            return self.rnn(x, state)
        found, state = self.rnn(x, state.transpose(0, 1).contiguous())
        return found, state.transpose(0, 1)


@pytest.mark.parametrize("count", [6, 2])
def test_states_with_samples_in_the_second_dimension_have_a_way(count):
    line = Recurrent.forward.__code__.co_firstlineno
    x = torch.randn(count, 5, 4)
    with pytest.raises(SpecError, match=r"state\.transpose\(0, 1\)\.contig") as raised:
        capture(Recurrent(samples_first=False), (x, torch.zeros(2, count, 3)))
    assert f"{__file__}:" in str(raised.value)
    assert count == 2 or f":{line}: " in str(raised.value)
    capture(Recurrent(samples_first=True), (x, torch.zeros(count, 2, 3)))


def test_sequences_first_have_a_way():
    with pytest.raises(SpecError, match="if the 6 in dimension 1 are the samples"):
        capture(
            Recurrent(samples_first=False), (torch.randn(5, 6, 4), torch.zeros(2, 6, 3))
        )


def neighbors(_net, h, edges):
    return edges @ h


def test_a_graph_of_all_samples_has_a_way_that_is_captured():
    message = refusal(neighbors, torch.ones(6, 6))
    assert "(graphs, nodes, nodes)" in message
    capture(Net(neighbors), (torch.randn(5, 6, 4), torch.ones(5, 6, 6)))


def test_a_list_of_edges_has_that_way():
    message = refusal(lambda _net, h, edges: h[edges[0]], torch.zeros(2, 9).long())
    assert "(graphs, nodes, nodes)" in message


class Named(torch.Tensor):
    """A class of tensors."""


def test_as_subclass_has_a_way():
    message = refusal(lambda _net, h: h.as_subclass(Named))
    assert "as_subclass() in forward can't be recorded" in message


def test_experts_whose_rows_depend_on_values_have_a_way_that_is_captured():
    def chosen(net, h, weights):
        rows = (weights[:, 0] > 0).nonzero()[:, 0]
        return h.index_add(0, rows, net.expert(h[rows]))

    def all_rows(net, h, weights):
        return h + net.expert(h) * (weights[:, :1] > 0)

    message = refusal(chosen, torch.ones(6, 2), expert=nn.Linear(4, 4))
    assert "set_experts_implementation" not in message
    assert "computes each expert for all rows" in message
    net = Net(all_rows, expert=nn.Linear(4, 4))
    capture(net, (torch.randn(6, 4), torch.ones(6, 2)))


LOGGED = []


def logs(_net, h):
    LOGGED.append(tuple(h.shape[1:]))
    return h


def test_a_list_that_forward_appends_to_is_refused_with_a_way():
    message = refusal(logs)
    assert "LOGGED" in message
    assert "register a forward hook on a module of torch.nn" in message
