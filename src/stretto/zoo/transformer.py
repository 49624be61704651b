"""Transformers: Vaswani et al. 2017, BERT (Devlin et al. 2019), GPT-2 (Radford 2019).

Names are those of the widely used PyTorch implementations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.zoo.graph import Builder, ModelGraph, tokens

if TYPE_CHECKING:
    from stretto.zoo.graph import Value


def bert(name: str, layers: int, width: int, length: int) -> ModelGraph:
    """Build BERT with its pretraining heads; the word decoder shares the embedding."""
    vocabulary, positions = 30522, 512
    net = Builder(name, f"{length} tokens")
    at = "bert.embeddings"
    parts = [
        _embedding(net, f"{at}.{part}_embeddings", rows, width, length)
        for part, rows in (
            ("word", vocabulary),
            ("position", positions),
            ("token_type", 2),
        )
    ]
    x = net.layer_norm(f"{at}.LayerNorm", net.add(f"{at}.add", parts))
    for number in range(layers):
        x = _bert_layer(net, f"bert.encoder.layer.{number}", x)
    pooled = net.layer(
        "linear",
        "bert.pooler.dense",
        [x],
        (width,),
        macs=width * width,
        weights=[("weight", (width, width)), ("bias", (width,))],
    )
    net.linear("cls.seq_relationship", pooled, 2)
    y = net.linear("cls.predictions.transform.dense", x, width)
    y = net.layer_norm("cls.predictions.transform.LayerNorm", y)
    net.layer(
        "linear",
        "cls.predictions",
        [y],
        (length, vocabulary),
        macs=length * width * vocabulary,
        weights=[("bias", (vocabulary,))],
    )
    return net.graph()


def gpt2(name: str, layers: int, width: int, length: int) -> ModelGraph:
    """Build GPT-2; the output layer shares the embedding's tensor."""
    vocabulary, positions = 50257, 1024
    net = Builder(name, f"{length} tokens")
    parts = [
        _embedding(net, "transformer.wte", vocabulary, width, length),
        _embedding(net, "transformer.wpe", positions, width, length),
    ]
    x = net.add("transformer.add", parts)
    for number in range(layers):
        at = f"transformer.h.{number}"
        y = net.layer_norm(f"{at}.ln_1", x)
        y = net.linear(
            f"{at}.attn.c_attn", y, 3 * width, weight_shape=(width, 3 * width)
        )
        y = net.layer(
            "attention",
            f"{at}.attn.products",
            [y],
            (length, width),
            macs=2 * length * length * width,
        )
        y = net.linear(f"{at}.attn.c_proj", y, width)
        x = net.add(f"{at}.add_1", [x, y])
        y = net.layer_norm(f"{at}.ln_2", x)
        y = net.linear(f"{at}.mlp.c_fc", y, 4 * width, weight_shape=(width, 4 * width))
        y = net.linear(f"{at}.mlp.c_proj", y, width, weight_shape=(4 * width, width))
        x = net.add(f"{at}.add_2", [x, y])
    x = net.layer_norm("transformer.ln_f", x)
    _tied_output(net, "lm_head", x, vocabulary)
    return net.graph()


def transformer(name: str, length: int) -> ModelGraph:
    """Build the base Transformer with one vocabulary for source, target and output.

    AIACC-Training's Table I gives 66.5 M parameters and 145 G operations but no
    architecture; the vocabulary and the length here are chosen to match these.
    """
    vocabulary, width, inner, layers = 43_680, 512, 2048, 6
    net = Builder(name, f"{length} tokens")
    source = _embedding(net, "embedding", vocabulary, width, length)
    for number in range(layers):
        at = f"encoder.layers.{number}"
        source = _attend(net, f"{at}.self_attn", f"{at}.norm1", source, source)
        source = _feed_forward(net, at, f"{at}.norm2", source, inner)
    # The target's embedding is the same tensor.
    x = net.layer("embedding", "target_embedding", [], (length, width))
    for number in range(layers):
        at = f"decoder.layers.{number}"
        x = _attend(net, f"{at}.self_attn", f"{at}.norm1", x, x)
        x = _attend(net, f"{at}.multihead_attn", f"{at}.norm2", x, source)
        x = _feed_forward(net, at, f"{at}.norm3", x, inner)
    _tied_output(net, "output", x, vocabulary)
    return net.graph()


def _embedding(net: Builder, name: str, rows: int, width: int, length: int) -> Value:
    weights = [("weight", (rows, width))]
    return net.layer(
        "embedding", name, [tokens(length)], (length, width), weights=weights
    )


def _tied_output(net: Builder, name: str, x: Value, vocabulary: int) -> Value:
    """Return scores of all words, from the embedding's own tensor."""
    length, width = x.shape
    macs = length * width * vocabulary
    return net.layer("linear", name, [x], (length, vocabulary), macs=macs)


def _bert_layer(net: Builder, name: str, x: Value) -> Value:
    width = x.shape[1]
    query, key, value = (
        net.linear(f"{name}.attention.self.{part}", x, width)
        for part in ("query", "key", "value")
    )
    y = net.attention(f"{name}.attention.self.products", query, key, value)
    y = net.linear(f"{name}.attention.output.dense", y, width)
    y = net.add(f"{name}.attention.output.add", [x, y])
    x = net.layer_norm(f"{name}.attention.output.LayerNorm", y)
    y = net.linear(f"{name}.intermediate.dense", x, 4 * width)
    y = net.linear(f"{name}.output.dense", y, width)
    y = net.add(f"{name}.output.add", [x, y])
    return net.layer_norm(f"{name}.output.LayerNorm", y)


def _attend(net: Builder, name: str, norm: str, x: Value, memory: Value) -> Value:
    width = x.shape[1]
    query = net.linear(f"{name}.q_proj", x, width)
    key = net.linear(f"{name}.k_proj", memory, width)
    value = net.linear(f"{name}.v_proj", memory, width)
    y = net.attention(f"{name}.products", query, key, value)
    y = net.add(f"{name}.add", [x, net.linear(f"{name}.out_proj", y, width)])
    return net.layer_norm(norm, y)


def _feed_forward(net: Builder, name: str, norm: str, x: Value, inner: int) -> Value:
    y = net.linear(f"{name}.linear2", net.linear(f"{name}.linear1", x, inner), 512)
    return net.layer_norm(norm, net.add(f"{name}.add", [x, y]))
