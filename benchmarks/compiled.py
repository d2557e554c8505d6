"""Compiled stages against those that are not: a step of a GPT-2 on two CPU devices, with dropout and recomputation.

Both arms train the same model and take turns. Compiling is measured apart, and the gradients of a shorter model are
compared, for which the compiled one draws by torch's own kernels (``fallback_random``), so that both drop the same.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import rounds, seconds_of, table
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline
from benchmarks.turns import alternating

__all__ = ["CompiledSize", "run", "show"]

_DEVICES = ("cpu:0", "cpu:1")


@dataclass(frozen=True, slots=True)
class CompiledSize:
    """The model, by default GPT-2 small, and how much is measured."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    samples: int = 8
    tokens: int = 64
    """Of a sample."""
    microbatches: int = 4
    shorter_tokens: int = 48
    """Of samples that come later, and are of a length that is new."""
    checked_layers: int = 2
    """Of the model whose gradients are compared."""
    regional: bool = True
    """Whether blocks are compiled, and not whole stages."""
    rounds: int = 6


def run(progress: Progress, size: CompiledSize | None = None, backend: str = "inductor") -> Figures:
    """Medians of ``step``, in milliseconds; what was compiled, and how far the gradients are off."""
    size = size or CompiledSize()
    arms = {"eager": False, "compiled": {"backend": backend, "regional": size.regional}}
    times: dict[str, list[float]] = {name: [] for name in arms}
    first = {}
    with ExitStack() as stack:
        pipes = {name: stack.enter_context(_pipeline(size, size.layers, option)) for name, option in arms.items()}
        for name, pipe in pipes.items():
            progress(f"first step, {name}")
            first[name] = seconds_of(partial(_step, pipe, size))
            progress(f"{first[name]:.1f} s")
            _step(pipe, size)
        for number in rounds(size.rounds, progress):
            for name in alternating(list(arms), number):
                times[name].append(seconds_of(partial(_step, pipes[name], size)))
        compiled = pipes["compiled"].compiled
        shorter = {
            name: seconds_of(partial(_step, pipe, replace(size, tokens=size.shorter_tokens)))
            for name, pipe in pipes.items()
        }
    progress("; ".join(f"{name} {median(seconds) * 1e3:.0f} ms" for name, seconds in times.items()))
    progress("comparing gradients")
    off = _gradients_off(size, backend)
    return {
        "step_ms": {name: median(seconds) * 1e3 for name, seconds in times.items()},
        "best_ms": {name: min(seconds) * 1e3 for name, seconds in times.items()},
        "first_step_seconds": first,
        "new_length_seconds": shorter,
        "gradients_off": off,
        "stages": [str(stage) for stage in compiled],
        "graphs": [(stage.forward_graphs, stage.backward_graphs) for stage in compiled],
        "graph_breaks": sum(len(stage.graph_breaks) for stage in compiled),
        "recompilations": sum(len(stage.recompilations) for stage in compiled),
        "compile_seconds": sum(stage.seconds for stage in compiled),
    }


def show(figures: Figures) -> str:
    """The figures as text."""
    rows: list[tuple[str, ...]] = [("", "eager", "compiled")]
    for title, key, unit in (("median step", "step_ms", "ms"), ("best step", "best_ms", "ms")):
        rows.append((title, *(f"{figures[key][name]:.0f} {unit}" for name in ("eager", "compiled"))))
    for title, key in (("first step", "first_step_seconds"), ("first step of a new length", "new_length_seconds")):
        rows.append((title, *(f"{figures[key][name]:.1f} s" for name in ("eager", "compiled"))))
    ratio = figures["step_ms"]["compiled"] / figures["step_ms"]["eager"]
    return "\n".join(
        [
            *table(rows),
            "",
            f"compiled / eager: {ratio:.2f}; gradients off by {figures['gradients_off']:.1e} of their norm",
            f"{figures['graph_breaks']} graph breaks, {figures['recompilations']} recompilations",
            *figures["stages"],
        ]
    )


def _gradients_off(size: CompiledSize, backend: str) -> float:
    """The distance of the gradients of one step with and without the compiler, relative to their norm."""
    option: dict[str, Any] = {"backend": backend, "regional": size.regional}
    if backend == "inductor":
        option["options"] = {"fallback_random": True}
    found = []
    for each in (False, option):
        with _pipeline(size, size.checked_layers, each) as pipe:
            _step(pipe, size, keep=True)
            found.append(torch.cat([p.grad.flatten() for p in pipe.module.parameters() if p.grad is not None]))
    return float((found[0] - found[1]).norm() / found[0].norm())


def _step(pipe: SyncPipeline, size: CompiledSize, *, keep: bool = False) -> None:
    batch = _batch(size)
    torch.manual_seed(1)
    pipe.step(*batch, return_outputs=False)
    if not keep:
        pipe.module.zero_grad()


def _batch(size: CompiledSize) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(size.vocabulary, (size.samples, size.tokens + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _pipeline(size: CompiledSize, layers: int, option: Any) -> SyncPipeline:
    torch.manual_seed(0)
    embedding = _Embedding(size)
    blocks = [_GptBlock(size) for _ in range(layers)]
    head = _Head(size)
    head.project.weight = embedding.tokens.weight
    modules = [embedding, *blocks, head]
    half = (len(modules) + 1) // 2
    return Pipeline(
        modules,
        _DEVICES,
        microbatches=size.microbatches,
        balance=[half, len(modules) - half],
        checkpoint="always",
        loss_fn=_loss,
        compile=option,
    ).sync()


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class _Embedding(nn.Module):
    """Tokens and positions, with dropout."""

    def __init__(self, size: CompiledSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(0.01 * torch.randn(size.tokens, size.width))
        self.drop = nn.Dropout(0.1)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.drop(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        return found


class _GptBlock(nn.Module):
    """A block of GPT-2: attention and a perceptron of four times the width, each behind a layer norm."""

    def __init__(self, size: CompiledSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.widen, self.narrow = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.attend(self.before_attention(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = self.drop(scores.masked_fill(hidden, -math.inf).softmax(-1))
        x = x + self.drop(self.mix((weights @ value).transpose(1, 2).reshape(samples, tokens, width)))
        wide = nn.functional.gelu(self.widen(self.before_mlp(x)), approximate="tanh")
        found: Tensor = x + self.drop(self.narrow(wide))
        return found


class _Head(nn.Module):
    """The last layer norm, and a logit for each word."""

    def __init__(self, size: CompiledSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.project = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.project(self.norm(x))
        return logits
