"""The layers that models are made of: by the kind of value that they take and return, then by name.

A tag says what the judge must know: ``draws`` (random numbers), ``detached`` (its gradient is by design not the
derivative of its output), ``batch`` (needs two samples), ``slow`` (to build), ``float`` (float32 inside), ``reentrant``
(its input must require a gradient, or torch makes none for its parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.campaigns.differential import layers as own
from tests.campaigns.differential.layers import CHANNELS, SIDE, TIME, WIDTH

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


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _traced_script() -> nn.Module:
    with torch.random.fork_rng():
        return torch.jit.trace(nn.Sequential(_linear(), nn.Tanh()), torch.randn(2, WIDTH))


def _small_net() -> nn.Module:
    return nn.Sequential(_linear(), nn.GELU(), _linear())


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _old(normalise: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A layer with one of torch's former normalisations of weights, by hooks."""
    return lambda: normalise(_linear())


ACTIVATIONS = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.1, inplace=True),
    "Hardtanh in place": lambda: nn.Hardtanh(-1, 1, inplace=True),
    "GELU": nn.GELU,
    "Tanh": nn.Tanh,
    "PReLU": nn.PReLU,
    "Identity": nn.Identity,
    "Fn": lambda: own.Fn(torch.sin),
    "view": lambda: own.View("flatten"),
    "part of a stack": lambda: own.View("part"),
    "expanded": lambda: own.View("expand"),
    "strided": lambda: own.View("strided"),
    "its input": lambda: own.View("same"),
    "tensor hook": (own.TensorHook, "detached"),
    "counter": own.Counter,
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), "draws"),
    "Dropout": (lambda: nn.Dropout(0.4), "draws"),
    "Dropout in place": (lambda: nn.Dropout(0.4, inplace=True), "draws"),
    "RReLU": (nn.RReLU, "draws detached"),
}
"""Fit every kind."""

ON_ROWS = {
    "Linear": _linear,
    "Linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen Linear": lambda: _frozen(_linear()),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "Softmax": lambda: nn.Softmax(-1),
    "GLU": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "small net": _small_net,
    "residual": lambda: own.Residual(_small_net()),
    "residual in place": lambda: own.Residual(_linear(), in_place=True),
    "Bilinear": own.Bilinear,
    "Experts": own.Experts,
    "partly used": (own.PartlyUsed, "detached"),
    "complex": own.Complex,
    "autograd function": own.Cubed,
    "inner gradient": own.InnerGradient,
    "float32 inside": (own.Half, "float"),
    "Embedding": lambda: own.Bucketed(nn.Embedding(WIDTH + 1, WIDTH)),
    "Embedding with padding": (lambda: own.Bucketed(nn.Embedding(WIDTH + 1, WIDTH, padding_idx=2)), "detached"),
    "sparse Embedding": lambda: own.Bucketed(nn.Embedding(WIDTH + 1, WIDTH, sparse=True)),
    "Embedding of bounded norm": (lambda: own.Bucketed(nn.Embedding(WIDTH + 1, WIDTH, max_norm=1.0)), "detached"),
    "EmbeddingBag": lambda: own.Bucketed(nn.EmbeddingBag(WIDTH + 1, WIDTH)),
    "EMA": (own.Ema, "detached"),
    "EMA replaced": (lambda: own.Ema(in_place=False), "detached"),
    "centroids": (own.Centroids, "detached"),
    "memory": (own.Memory, "detached"),
    "spectral norm": (lambda: parametrizations.spectral_norm(_linear()), "detached"),
    "spectral norm by hooks": (_old(nn.utils.spectral_norm), "detached"),
    "weight norm": lambda: parametrizations.weight_norm(_linear()),
    "orthogonal": lambda: parametrizations.orthogonal(_linear()),
    "add in place": lambda: own.InPlace("add"),
    "relu_": lambda: own.InPlace("relu"),
    "slice in place": lambda: own.InPlace("slice"),
    "masked in place": lambda: own.InPlace("masked"),
    "in place on its own": lambda: own.InPlace("own"),
    "saved tensor hooks": own.SavedTensors,
    "vmap": own.Vmapped,
    "checkpoint": lambda: own.Checkpointed(_small_net(), reentrant=False),
    "reentrant checkpoint": (lambda: own.Checkpointed(_small_net(), reentrant=True), "detached reentrant"),
    "scripted": lambda: torch.jit.script(nn.Sequential(_linear(), nn.Tanh())),
    "scripted counter": lambda: torch.jit.script(own.Scriptable()),
    "traced script": _traced_script,
    "scripted function": own.ScriptedFunction,
    "compiled eager": (lambda: torch.compile(_small_net(), backend="eager"), "slow"),
    "compiled aot_eager": (lambda: torch.compile(_small_net(), backend="aot_eager"), "slow"),
    # In float64 aot_eager of torch 2.13 drops the update of the buffer, without a pipeline too.
    "compiled EMA": (lambda: torch.compile(own.Ema(), backend="eager"), "slow detached"),
    # Draws
    "scripted dropout": (lambda: own.ScriptedFunction(0.4), "draws"),
    "scripted Dropout": (lambda: torch.jit.script(nn.Sequential(_linear(), nn.Dropout(0.4))), "draws"),
    "compiled dropout": (
        lambda: torch.compile(nn.Sequential(_linear(), nn.Dropout(0.4)), backend="eager"),
        "slow draws",
    ),
    "compiled dropout aot": (
        lambda: torch.compile(nn.Sequential(_linear(), nn.Dropout(0.4)), backend="aot_eager"),
        "slow draws",
    ),
    "checkpoint of dropout": (
        lambda: own.Checkpointed(nn.Sequential(_linear(), nn.Dropout(0.4), _linear()), False),
        "draws",
    ),
    "reentrant checkpoint of dropout": (
        lambda: own.Checkpointed(nn.Sequential(_linear(), nn.Dropout(0.4), _linear()), True),
        "draws detached reentrant",
    ),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), "draws"),
    **{
        f"noise by {how}": (partial(own.Noise, how), "draws")
        for how in ("randn_like", "rand", "bernoulli", "uniform_", "gumbel", "branch", "multinomial")
    },
    "noise by randperm": (partial(own.Noise, "randperm"), "draws"),
}
"""Fit vectors and sequences: they work on the last dimension."""

VECTOR = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), "batch"),
    "BatchNorm1d, mean of all": (lambda: nn.BatchNorm1d(WIDTH, momentum=None), "batch"),
    "BatchNorm1d without statistics": (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), "batch"),
    "BatchNorm1d without weights": (lambda: nn.BatchNorm1d(WIDTH, affine=False), "batch"),
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
}

SEQUENCE = {
    "LSTM": lambda: own.Recurrent(nn.LSTM),
    "LSTM of two layers": lambda: own.Recurrent(nn.LSTM, num_layers=2),
    "bidirectional GRU": lambda: own.Recurrent(nn.GRU, bidirectional=True),
    "RNN": lambda: own.Recurrent(nn.RNN, nonlinearity="relu"),
    "GRUCell": lambda: own.Unrolled(nn.GRUCell(WIDTH, WIDTH)),
    "LSTMCell": lambda: own.Unrolled(nn.LSTMCell(WIDTH, WIDTH)),
    "MultiheadAttention": own.SelfAttention,
    "MultiheadAttention with bias_kv": lambda: own.SelfAttention(add_bias_kv=True),
    "causal attention": own.CausalAttention,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "TransformerEncoderLayer, norm first": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 8, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    ),
    "TransformerDecoderLayer": own.Decoder,
    "Conv1d": lambda: own.Swapped(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "BatchNorm1d over time": (lambda: own.Swapped(nn.BatchNorm1d(WIDTH)), "batch"),
    "InstanceNorm1d": lambda: own.Swapped(nn.InstanceNorm1d(WIDTH, affine=True)),
    "MaxPool1d": lambda: own.Swapped(nn.MaxPool1d(3, 1, 1)),
    "LSTM with dropout": (lambda: own.Recurrent(nn.LSTM, num_layers=2, dropout=0.4), "draws"),
    "attention with dropout": (lambda: own.SelfAttention(dropout=0.3), "draws"),
    "causal attention with dropout": (lambda: own.CausalAttention(0.3), "draws"),
    "TransformerEncoderLayer with dropout": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True),
        "draws",
    ),
    "Dropout1d": (lambda: own.Swapped(nn.Dropout1d(0.4)), "draws"),
}


class _ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x.contiguous(memory_format=torch.channels_last))
        return y.contiguous(memory_format=torch.channels_last)


def _conv(**options: Any) -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, **options)


def _residual_block() -> nn.Module:
    norm, relu = nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)
    return own.Residual(nn.Sequential(_conv(bias=False), norm, relu, _conv()))


IMAGE = {
    "Conv2d": _conv,
    "Conv2d channels_last": lambda: _conv().to(memory_format=torch.channels_last),
    "to channels_last": _ChannelsLast,
    "depthwise Conv2d": lambda: _conv(groups=CHANNELS),
    "dilated Conv2d": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
    "circular Conv2d": lambda: _conv(padding_mode="circular"),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(CHANNELS), "batch"),
    "GroupNorm": lambda: nn.GroupNorm(2, CHANNELS),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "InstanceNorm2d with statistics": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
    "LayerNorm on channels": lambda: own.Last(nn.LayerNorm(CHANNELS)),
    "MaxPool2d": lambda: nn.MaxPool2d(3, 1, 1),
    "down and up": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")),
    "PixelShuffle": lambda: nn.Sequential(_conv(), nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "spectral norm of Conv2d": (lambda: parametrizations.spectral_norm(_conv()), "detached"),
    "weight norm of Conv2d": lambda: parametrizations.weight_norm(_conv()),
    "scripted Conv2d": lambda: torch.jit.script(_conv()),
    "block": (_residual_block, "batch"),
    "checkpoint of a block": (
        lambda: own.Checkpointed(nn.Sequential(_conv(), nn.GroupNorm(2, CHANNELS), nn.ReLU(inplace=True)), False),
        "",
    ),
    "reentrant checkpoint of Conv2d": (
        lambda: own.Checkpointed(nn.Sequential(_conv(), nn.GELU()), True),
        "detached reentrant",
    ),
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
