"""The layers that models are made of: by the kind of value that they take and return, then by name.

A tag says what a judge must know: ``draws`` (random numbers), ``detached`` (its gradient is by design not the
derivative of its output), ``batch`` (needs two samples), ``slow`` (to build), ``float`` (float32 inside), ``reentrant``
(its input must require a gradient, or torch makes none for its parameters), ``changes`` (its forward changes buffers or
weights), ``repeats`` (uses a weight several times), ``stays`` (torch cannot pickle it), ``fails`` (where a batch has a
number that is none), ``settles`` (the first call of TorchScript in a process rounds otherwise than later calls).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.campaigns.models import layers as own
from tests.campaigns.models.layers import CHANNELS, SIDE, TIME, WIDTH, checkpointed, linear, moved

KINDS = ("vector", "sequence", "image")


@dataclass(frozen=True)
class Piece:
    """How to make a layer, and its tags."""

    make: Callable[[], nn.Module]
    tags: frozenset[str] = frozenset()


def _pieces(table: dict[str, Any]) -> dict[str, Piece]:
    """``name: make`` or ``name: (make, "tag tag")``."""
    return {
        name: Piece(entry[0], frozenset(entry[1].split())) if isinstance(entry, tuple) else Piece(entry)
        for name, entry in table.items()
    }


def _traced_script() -> nn.Module:
    with torch.random.fork_rng():
        return torch.jit.trace(nn.Sequential(linear(), nn.Tanh()), torch.randn(2, WIDTH))


def _small_net() -> nn.Module:
    return nn.Sequential(linear(), nn.GELU(), linear())


def _dropping_net() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Dropout(0.4))


def _on(normalise: Callable[..., Any], layer: Callable[[], nn.Module] = linear) -> Callable[[], nn.Module]:
    """A layer with one of torch's normalisations of weights."""
    return lambda: normalise(layer())


def _looked_up(table: type[nn.Module] = nn.Embedding, **options: Any) -> Callable[[], nn.Module]:
    return lambda: own.bucketed(table(WIDTH + 1, WIDTH, **options))


ACTIVATIONS = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.1, inplace=True),
    "Hardtanh in place": lambda: nn.Hardtanh(-1, 1, inplace=True),
    "GELU": nn.GELU,
    "Tanh": nn.Tanh,
    "PReLU": nn.PReLU,
    "Identity": nn.Identity,
    "Fn": lambda: own.fn(torch.sin),
    **{name: (lambda view=view: own.Of(lambda _, x: view(x))) for name, view in own.VIEWS.items()},
    "fails": (lambda: own.Of(own.fail_if_nan), "fails"),
    "tensor hook": (own.tensor_hook, "detached"),
    "counter": (own.counter, "changes"),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), "draws"),
    "Dropout": (lambda: nn.Dropout(0.4), "draws"),
    "Dropout in place": (lambda: nn.Dropout(0.4, inplace=True), "draws"),
    "RReLU": (nn.RReLU, "draws detached"),
}
"""Fit every kind."""

ON_ROWS = {
    "Linear": linear,
    "Linear without bias": lambda: linear(bias=False),
    "frozen Linear": lambda: linear().requires_grad_(False),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "Softmax": lambda: nn.Softmax(-1),
    "GLU": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "small net": _small_net,
    "residual": lambda: own.residual(_small_net()),
    "residual in place": lambda: own.residual(linear(), in_place=True),
    "Bilinear": lambda: own.Of(lambda layer, x: layer.layer(x, x.tanh()), layer=nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "Experts": own.experts,
    "partly used": (own.partly_used, "detached"),
    "complex": own.complex_filter,
    "autograd function": own.cubed,
    "inner gradient": own.inner_gradient,
    "float32 inside": (
        lambda: own.Of(lambda layer, x: layer.linear(x).float().tanh().to(x.dtype), linear=linear()),
        "float",
    ),
    "Embedding": _looked_up(),
    "Embedding with padding": (_looked_up(padding_idx=2), "detached"),
    "sparse Embedding": _looked_up(sparse=True),
    "Embedding of bounded norm": (_looked_up(max_norm=1.0), "detached changes"),
    "EmbeddingBag": _looked_up(nn.EmbeddingBag),
    "EMA": (own.Ema, "detached changes"),
    "EMA replaced": (lambda: own.Ema(in_place=False), "detached changes"),
    "centroids": (own.centroids, "detached changes"),
    "memory": (own.Memory, "detached changes"),
    "spectral norm": (_on(parametrizations.spectral_norm), "detached changes stays"),
    "spectral norm by hooks": (_on(nn.utils.spectral_norm), "detached changes"),
    "weight norm": (_on(parametrizations.weight_norm), "stays"),
    "orthogonal": (_on(parametrizations.orthogonal), "stays"),
    "add in place": lambda: own.in_place("add"),
    "relu_": lambda: own.in_place("relu"),
    "slice in place": lambda: own.in_place("slice"),
    "masked in place": lambda: own.in_place("masked"),
    "in place on its own": lambda: own.in_place("own"),
    "saved tensor hooks": own.saved_tensors,
    "vmap": lambda: own.Of(
        lambda layer, x: torch.func.vmap(lambda row: row @ layer.weight)(x),
        weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 3),
    ),
    "checkpoint": lambda: checkpointed(_small_net()),
    "reentrant checkpoint": (lambda: checkpointed(_small_net(), reentrant=True), "detached reentrant"),
    "scripted": (lambda: torch.jit.script(nn.Sequential(linear(), nn.Tanh())), "stays"),
    "scripted counter": (lambda: torch.jit.script(own.Scriptable()), "changes stays"),
    "traced script": (_traced_script, "stays"),
    "scripted function": (own.ScriptedFunction, "settles"),
    "compiled eager": (lambda: torch.compile(_small_net(), backend="eager"), "slow"),
    "compiled aot_eager": (lambda: torch.compile(_small_net(), backend="aot_eager"), "slow"),
    # In float64 aot_eager of torch 2.13 drops the update of the buffer, without a pipeline too.
    "compiled EMA": (lambda: torch.compile(own.Ema(), backend="eager"), "slow detached changes"),
    # Draws
    "scripted dropout": (lambda: own.ScriptedFunction(0.4), "draws settles"),
    "scripted Dropout": (lambda: torch.jit.script(_dropping_net()), "draws stays"),
    "compiled dropout": (lambda: torch.compile(_dropping_net(), backend="eager"), "slow draws"),
    "compiled dropout aot": (lambda: torch.compile(_dropping_net(), backend="aot_eager"), "slow draws"),
    "checkpoint of dropout": (lambda: checkpointed(*_dropping_net(), linear()), "draws"),
    "reentrant checkpoint of dropout": (
        lambda: checkpointed(*_dropping_net(), linear(), reentrant=True),
        "draws detached reentrant",
    ),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), "draws"),
    **{f"noise by {how}": (partial(own.noise, how), "draws") for how in own.NOISE},
}
"""Fit vectors and sequences: they work on the last dimension."""

VECTOR = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), "batch changes"),
    "BatchNorm1d, mean of all": (lambda: nn.BatchNorm1d(WIDTH, momentum=None), "batch changes"),
    "BatchNorm1d without statistics": (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), "batch"),
    "BatchNorm1d without weights": (lambda: nn.BatchNorm1d(WIDTH, affine=False), "batch changes"),
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
}


def _encoder(dropout: float = 0.0, **options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=dropout, batch_first=True, **options)


SEQUENCE = {
    "LSTM": (lambda: own.recurrent(nn.LSTM), "repeats"),
    "LSTM of two layers": (lambda: own.recurrent(nn.LSTM, num_layers=2), "repeats"),
    "bidirectional GRU": (lambda: own.recurrent(nn.GRU, bidirectional=True), "repeats"),
    "RNN": (lambda: own.recurrent(nn.RNN, nonlinearity="relu"), "repeats"),
    "GRUCell": (lambda: own.unrolled(nn.GRUCell(WIDTH, WIDTH)), "repeats"),
    "LSTMCell": (lambda: own.unrolled(nn.LSTMCell(WIDTH, WIDTH)), "repeats"),
    "MultiheadAttention": own.self_attention,
    "MultiheadAttention with bias_kv": lambda: own.self_attention(add_bias_kv=True),
    "causal attention": own.causal_attention,
    "TransformerEncoderLayer": _encoder,
    "TransformerEncoderLayer, norm first": lambda: _encoder(norm_first=True, activation="gelu"),
    "TransformerDecoderLayer": own.decoder,
    "Conv1d": lambda: moved(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "BatchNorm1d over time": (lambda: moved(nn.BatchNorm1d(WIDTH)), "batch changes"),
    "InstanceNorm1d": lambda: moved(nn.InstanceNorm1d(WIDTH, affine=True)),
    "MaxPool1d": lambda: moved(nn.MaxPool1d(3, 1, 1)),
    "LSTM with dropout": (lambda: own.recurrent(nn.LSTM, num_layers=2, dropout=0.4), "draws repeats"),
    "attention with dropout": (lambda: own.self_attention(dropout=0.3), "draws"),
    "causal attention with dropout": (lambda: own.causal_attention(0.3), "draws"),
    "TransformerEncoderLayer with dropout": (lambda: _encoder(0.2), "draws"),
    "Dropout1d": (lambda: moved(nn.Dropout1d(0.4)), "draws"),
}


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _conv(**options: Any) -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, **options)


def _residual_block() -> nn.Module:
    norm, relu = nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)
    return own.residual(nn.Sequential(_conv(bias=False), norm, relu, _conv()))


IMAGE = {
    "Conv2d": _conv,
    "Conv2d channels_last": lambda: _conv().to(memory_format=torch.channels_last),
    "to channels_last": lambda: own.Of(lambda layer, x: _channels_last(layer.conv(_channels_last(x))), conv=_conv()),
    "depthwise Conv2d": lambda: _conv(groups=CHANNELS),
    "dilated Conv2d": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
    "circular Conv2d": lambda: _conv(padding_mode="circular"),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(CHANNELS), "batch changes"),
    "GroupNorm": lambda: nn.GroupNorm(2, CHANNELS),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "InstanceNorm2d with statistics": (lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True), "changes"),
    "LayerNorm on channels": lambda: moved(nn.LayerNorm(CHANNELS), to=-1),
    "MaxPool2d": lambda: nn.MaxPool2d(3, 1, 1),
    "down and up": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")),
    "PixelShuffle": lambda: nn.Sequential(_conv(), nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "spectral norm of Conv2d": (_on(parametrizations.spectral_norm, _conv), "detached changes stays"),
    "weight norm of Conv2d": (_on(parametrizations.weight_norm, _conv), "stays"),
    "scripted Conv2d": (lambda: torch.jit.script(_conv()), "stays"),
    "block": (_residual_block, "batch changes"),
    "checkpoint of a block": lambda: checkpointed(_conv(), nn.GroupNorm(2, CHANNELS), nn.ReLU(inplace=True)),
    "reentrant checkpoint of Conv2d": (lambda: checkpointed(_conv(), nn.GELU(), reentrant=True), "detached reentrant"),
    "compiled Conv2d": (lambda: torch.compile(nn.Sequential(_conv(), nn.GELU()), backend="aot_eager"), "slow"),
    "Dropout2d": (lambda: nn.Dropout2d(0.4), "draws"),
    "Dropout2d in place": (lambda: nn.Dropout2d(0.4, inplace=True), "draws"),
}


PIECES = {
    "vector": _pieces({**ACTIVATIONS, **ON_ROWS, **VECTOR}),
    "sequence": _pieces({**ACTIVATIONS, **ON_ROWS, **SEQUENCE}),
    "image": _pieces({**ACTIVATIONS, **IMAGE}),
}
"""By kind; layers of libraries are in the campaign of architectures."""

TO_VECTOR = {"sequence": TIME * WIDTH, "image": CHANNELS * SIDE * SIDE}
