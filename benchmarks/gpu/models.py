"""Small models of the checks: stages that take a given time, stages that note what passes, a GPT-2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe import Pipeline, SyncPipeline, is_recomputing
from benchmarks.gpu.machine import Machine

__all__ = [
    "FunctionLayer",
    "GptShape",
    "batch",
    "busy_stages",
    "by_parts",
    "delay",
    "distance",
    "gpt_batch",
    "gpt_layers",
    "gpt_loss",
    "layers",
    "mean_square",
    "note",
    "off",
    "piped",
    "stage",
    "take_gradients",
    "tanh_layers",
]

mse = functional.mse_loss


class Delayed(torch.autograd.Function):
    """Passes a tensor on, and its gradient back, each after so many seconds on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float, machine: Machine) -> Tensor:
        ctx.seconds, ctx.machine = backward, machine
        machine.busy(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.machine.busy(ctx.seconds)
        return gradient.clone(), None, None, None


def delay(machine: Machine, seconds: float) -> Callable[[Tensor], Tensor]:
    """A function that takes so many seconds forwards, and as many backwards."""

    def delayed(x: Tensor) -> Tensor:
        passed: Tensor = Delayed.apply(x, seconds, seconds, machine)  # type: ignore[no-untyped-call]
        return passed

    return delayed


class FunctionLayer(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


def stage(function: Callable[..., Any], width: int = 8) -> nn.Sequential:
    """A linear layer with ``function`` behind it."""
    return nn.Sequential(nn.Linear(width, width).double(), FunctionLayer(function))


def busy_stages(machine: Machine, seconds: float, count: int = 2) -> nn.Sequential:
    """Stages whose forwards and backwards take so many seconds."""
    return nn.Sequential(*(stage(delay(machine, seconds)) for _ in range(count)))


def note(first: list[Tensor], again: list[Tensor]) -> FunctionLayer:
    """A layer that notes what passes it, in forwards and in recomputations."""

    def passing(x: Any) -> Tensor:
        value: Tensor = x[0] if isinstance(x, tuple) else x
        (again if is_recomputing() else first).append(value.detach().clone())
        return value

    return FunctionLayer(passing)


def layers(width: int = 8, count: int = 4) -> nn.Sequential:
    """Always the same model, in float64."""
    torch.manual_seed(7)
    return nn.Sequential(*(stage(torch.tanh, width) for _ in range(count)))


def tanh_layers(width: int, count: int, dropout: float = 0.0) -> nn.Sequential:
    """So many linear layers with an activation behind each, in float32; the last may drop."""
    made: list[nn.Module] = [each for _ in range(count) for each in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*made, *([nn.Dropout(dropout)] if dropout else []))


def batch(samples: int, width: int = 8) -> Tensor:
    """Always the same inputs, in float64."""
    torch.manual_seed(11)
    return torch.randn(samples, width, dtype=torch.float64)


def mean_square(output: Tensor) -> Tensor:
    """A loss without a target."""
    return output.square().mean()


def by_parts(model: nn.Module, x: Tensor, parts: int = 4) -> None:
    """What a step does, in a plain loop."""
    for part in x.chunk(parts):
        torch.autograd.backward(mean_square(model(part)))


def piped(model: nn.Module | Sequence[nn.Module], devices: Sequence[str], **options: Any) -> SyncPipeline:
    """A pipeline, to be opened by ``with``; nothing is recomputed unless that is asked for."""
    usual: dict[str, Any] = {"microbatches": 4, "checkpoint": "never", "loss_fn": mean_square}
    return Pipeline(model, devices, **(usual | options)).sync()


def take_gradients(model: nn.Module) -> list[Tensor | None]:
    """The gradients, which the model then has no more."""
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return taken


def distance(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> float:
    """The largest difference; infinite for what is missing or no number."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        gap = math.inf if a is None or b is None else float((_here(a) - _here(b)).abs().max())
        worst = max(worst, math.inf if math.isnan(gap) else gap)
    return worst


def _here(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def off(x: Tensor, target: Tensor, found: Sequence[Tensor | None]) -> float:
    """How far loss and gradients are from those of the unsplit ``layers()`` on the CPU, by autograd alone."""
    model = layers()
    loss = mse(model(x), target)
    torch.autograd.backward(loss)
    return distance(found, [loss, *take_gradients(model)])


# GPT-2


class GptShape:
    """The shape of a GPT-2; by default that of GPT-2 small."""

    def __init__(self, blocks: int = 12, width: int = 768, heads: int = 12, words: int = 50257, tokens: int = 1024):
        self.blocks, self.width, self.heads, self.words, self.tokens = blocks, width, heads, words, tokens


class GptEmbedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Parameter(0.01 * torch.randn(shape.tokens, shape.width))
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.words(tokens) + self.places[: tokens.shape[1]]
        return embedded


class GptLayer(nn.Module):
    """Attention and a perceptron of four times the width, each behind a layer norm, without dropout."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.attend(self.before(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(samples, tokens, width))
        found: Tensor = x + self.narrow(functional.gelu(self.widen(self.between(x)), approximate="tanh"))
        return found


def gpt_layers(shape: GptShape, device: torch.device, dtype: torch.dtype) -> list[nn.Module]:
    """The model, block by block, with a head of its own; made on the device."""
    torch.manual_seed(0)
    with device:
        blocks = [GptLayer(shape) for _ in range(shape.blocks)]
        head = nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.words, bias=False))
        made: list[nn.Module] = [GptEmbedding(shape), *blocks, head]
    return [each.to(dtype) for each in made]


def gpt_batch(shape: GptShape, samples: int, device: torch.device, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens, and the tokens that follow them."""
    torch.manual_seed(2)
    found = torch.randint(shape.words, (samples, (tokens or shape.tokens) + 1), device=device)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def gpt_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Of each next token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
