"""A script: the backward of every kind of layer with parameters, in two halves and in one, must give equal gradients.

A half asks torch's kernels for some of their gradients only, and a kernel that was never asked so may crash. So this
runs in a process of its own. It prints each case before it runs it, and ``wrong`` behind one with other gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from asyncpipe.ops.autograd.split_backward import SplitBackward


class Calls(nn.Module):
    """``function(*inputs, *parameters)``."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(*shape)) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


class First(nn.Module):
    """The first item of what a layer returns."""

    def __init__(self, layer: nn.Module, repeat: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.repeat = repeat

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.layer(*inputs * self.repeat)[0]


def frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


class Checkpointed(nn.Sequential):
    """Layers that run again in each half."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def bag(mode: str) -> nn.Module:
    tokens = torch.randint(0, 7, (4, 3))
    return Calls(lambda x, weight: F.embedding_bag(tokens, weight, mode=mode) * x[:, 0, 0], (7, 6))


def attention(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
X, SEQUENCE = (4, 8, 6, 6), (4, 3, 8)

CASES: dict[str, Case] = {
    "PReLU": (lambda: nn.PReLU(8), X),
    "RMSNorm": (lambda: nn.RMSNorm(6), X),
    "LayerNorm": (lambda: nn.LayerNorm((6, 6)), X),
    "GroupNorm, weight frozen": (lambda: frozen(nn.GroupNorm(2, 8), "weight"), X),
    "GroupNorm of 64 channels": (lambda: nn.GroupNorm(32, 64), (2, 64, 16, 16)),
    "GroupNorm of a parameter": (lambda: Calls(lambda x, w: F.group_norm(channels_last(w), 2, x), X), (8,)),
    "GroupNorm by its input": (
        lambda: Calls(lambda x, w: F.group_norm(channels_last(w), 2, x.sum((0, 2, 3)), x.mean((0, 2, 3))), X),
        X,
    ),
    "GroupNorm in a checkpoint": (lambda: Checkpointed(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.PReLU()), X),
    "Bilinear": (lambda: First(nn.Bilinear(8, 8, 5), 2), (3, 8)),
    "Embedding": (lambda: Calls(lambda x, w: F.embedding(torch.tensor([1, 5, 1, 0]), w) * x[:, 0, 0], (7, 6)), X),
    "EmbeddingBag, sum": (lambda: bag("sum"), X),
    "EmbeddingBag, weighted": (
        lambda: Calls(
            lambda x, w: F.embedding_bag(torch.randint(0, 7, (4, 3)), w, per_sample_weights=x, mode="sum"), (7, 5)
        ),
        (4, 3),
    ),
    "RNN": (lambda: First(nn.RNN(8, 5)), SEQUENCE),
    "GRU": (lambda: First(nn.GRU(8, 5, bidirectional=True)), SEQUENCE),
    "LSTM": (lambda: First(nn.LSTM(8, 5, num_layers=2)), SEQUENCE),
    "LSTM cell": (lambda: First(nn.LSTMCell(8, 5)), (3, 8)),
    "attention": (lambda: First(nn.MultiheadAttention(8, 2), 3), SEQUENCE),
    "attention with learned keys": (lambda: Calls(attention, X, X), X),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), SEQUENCE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 4, 3)), X),
    "addmm": (lambda: Calls(lambda x, b, w: torch.addmm(b, x, w), (5,), (8, 5)), (3, 8)),
    "grid_sample": (
        lambda: Calls(lambda x, w: F.grid_sample(x, w.tanh(), align_corners=False), (4, 5, 5, 2)),
        X,
    ),
}
for d in (1, 2, 3):
    shape = X[: 2 + d] + (6,) * (d - 2)
    for name in (f"Conv{d}d", f"ConvTranspose{d}d"):
        convolution = getattr(nn, name)
        CASES[name] = partial(convolution, 8, 4, 3, stride=2), shape
        CASES[f"{name} in groups"] = partial(convolution, 8, 8, 3, groups=2), shape
        CASES[f"{name} by channel"] = partial(convolution, 8, 8, 1, groups=8, bias=False), shape
    for name in (f"BatchNorm{d}d", f"InstanceNorm{d}d"):
        norm = partial(getattr(nn, name), 8, affine=True)
        CASES[name] = norm, shape
        CASES[f"{name}, eval"] = lambda norm=norm: norm(track_running_stats=True).eval(), shape
    CASES[f"GroupNorm of {d} dimensions"] = partial(nn.GroupNorm, 2, 8), shape

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(
        memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    ),
    "strided": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}
TOLERANCES = {torch.float64: 1e-9, torch.bfloat16: 3e-2}


def gradients(layer: nn.Module, x: Tensor, in_halves: bool) -> list[Tensor | None]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    y = layer(x)
    gradient = torch.randn_like(y)
    if in_halves:
        halves = SplitBackward([y], [gradient], [x])
        found = halves.input_gradients()
        halves.weight_gradients()
    else:
        y.backward(gradient)
        found = [x.grad]
    return [*found, *(parameter.grad for parameter in layer.parameters())]


def equal(ours: Tensor | None, wanted: Tensor | None, tolerance: float) -> bool:
    if ours is None or wanted is None:
        return ours is wanted
    return torch.allclose(ours.to_dense(), wanted.to_dense(), rtol=tolerance, atol=tolerance)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, (make, shape) in CASES.items():
        for layout, laid_out in LAYOUTS.items():
            for dtype, tolerance in TOLERANCES.items():
                print(f"{name}, {layout}, {str(dtype).removeprefix('torch.')}", flush=True)
                torch.manual_seed(0)
                layer, x = make().to(dtype), laid_out(torch.randn(shape).to(dtype))
                whole, halves = gradients(layer, x, in_halves=False), gradients(layer, x, in_halves=True)
                if not all(map(equal, halves, whole, [tolerance] * len(whole))):
                    print("wrong", flush=True)
    print("done")


if __name__ == "__main__":
    main()
