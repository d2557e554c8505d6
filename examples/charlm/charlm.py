"""A character language model of Python's own standard library: the workload of ``charlm.toml``.

The text is the source code that came with the running interpreter, so nothing is downloaded. The model is a
small GPT (Radford et al. 2019): pre-norm blocks, causal attention, learned positions. It is an
``nn.Sequential`` of ``[Embedding, Block …, Head]``, which is all that asyncpipe needs to cut it into stages.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from asyncpipe.errors import OptionError
from asyncpipe.train.workload import Batch, Forward, Workload

PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
OTHER = "\N{REPLACEMENT CHARACTER}"
ALPHABET = PRINTABLE + OTHER
"""97 symbols, so a model that knows nothing has a loss of ln 97 = 4.57 nats per character."""

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def build(
    *,
    width: int = 128,
    blocks: int = 5,
    heads: int = 4,
    context: int = 128,
    dropout: float = 0.0,
    prompt: str = "def ",
    sample_length: int = 300,
    max_bytes: int | None = None,
) -> Workload:
    """The workload: a GPT of ``blocks`` blocks that predicts the next character of the standard library.

    ``context`` and ``sample_length`` count characters. ``max_bytes`` shortens the text, for quick tests.
    """
    if width % heads:
        raise OptionError(f"width must be a multiple of heads, got width {width} and heads {heads}")
    text = read_standard_library(max_bytes)
    held_out_from = len(text) * 19 // 20
    training, held_out = text[:held_out_from], text[held_out_from:]
    model = nn.Sequential(
        Embedding(width, context, dropout),
        *(Block(width, heads, dropout, depth=blocks) for _ in range(blocks)),
        Head(width),
    )
    return Workload(
        model=model,
        loss_fn=next_character_loss,
        batches=lambda batch_size, generator: random_batches(training, context, batch_size, generator),
        memoryless=True,
        tokens_per_sample=context,
        held_out=lambda batch_size: spaced_batches(held_out, context, batch_size, count=8),
        sample=lambda forward: generate(forward, prompt, sample_length, context),
    )


# The text


def read_standard_library(max_bytes: int | None = None) -> Tensor:
    """The sources of the standard library as one uint8 tensor of positions in ``ALPHABET``, some 12 million."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if NOT_THE_LIBRARY.isdisjoint(path.relative_to(root).parts):
            sources.append(encode(path.read_bytes()))
            size += len(sources[-1])
            if max_bytes is not None and size >= max_bytes:
                break
    return torch.frombuffer(bytearray(b"".join(sources))[:max_bytes], dtype=torch.uint8)


def encode(utf8: bytes) -> bytes:
    """Each character's position in ``ALPHABET``, one byte a character."""
    table = bytearray([len(PRINTABLE)]) * 256
    for position, character in enumerate(PRINTABLE):
        table[ord(character)] = position
    # Without its continuation bytes, every character of UTF-8 is one byte.
    return utf8.translate(bytes(table), delete=b"\r" + bytes(range(0x80, 0xC0)))


def decode(positions: Tensor) -> str:
    """The text that ``positions`` (any integer tensor of one dimension) stand for."""
    return "".join(ALPHABET[position] for position in positions.tolist())


def random_batches(text: Tensor, context: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
    """Endless batches of windows at random places: input and, one character later, target, (batch, context)."""
    while True:
        starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
        yield cut(text, starts, context)


def spaced_batches(text: Tensor, context: int, batch_size: int, count: int) -> Iterator[Batch]:
    """``count`` batches of windows spread evenly over ``text``."""
    starts = torch.linspace(0, len(text) - context - 1, count * batch_size).long()
    for first in range(0, len(starts), batch_size):
        yield cut(text, starts[first : first + batch_size], context)


def cut(text: Tensor, starts: Tensor, context: int) -> Batch:
    """The windows that begin at ``starts``, and the same windows one character later."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


# The model


class Embedding(nn.Module):
    """Characters (batch, time) to vectors (batch, time, width), with learned positions."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        vectors: Tensor = self.dropout(self.characters(characters) + self.positions[: characters.shape[1]])
        return vectors


class Block(nn.Module):
    """One pre-norm transformer block, (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        # As in GPT-2: what is added to the residual stream starts smaller in deeper models.
        for linear, scale in ((self.merge, (2 * depth) ** -0.5), (self.shrink, (2 * depth) ** -0.5)):
            nn.init.normal_(linear.weight, std=scale * width**-0.5)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention(self.attention_norm(stream)))
        inner = functional.gelu(self.expand(self.mlp_norm(stream)))
        result: Tensor = stream + self.dropout(self.shrink(inner))
        return result

    def attention(self, normed: Tensor) -> Tensor:
        batch, time, width = normed.shape
        heads = self.queries_keys_values(normed).view(batch, time, 3, self.heads, -1).transpose(1, 3)
        queries, keys, values = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(batch, time, width))
        return merged


class Head(nn.Module):
    """Vectors (batch, time, width) to one logit per symbol, (batch, time, 97)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, len(ALPHABET), bias=False)
        # Almost no opinion at first, so the first loss is ln 97.
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(stream))
        return logits


def next_character_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats per character."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


# The sample


async def generate(forward: Forward, prompt: str, length: int, context: int, temperature: float = 0.7) -> str:
    """``prompt`` and ``length`` more characters, each drawn from what the model says of the last ``context``."""
    draws = Generator().manual_seed(0)
    text = torch.frombuffer(bytearray(encode(prompt.encode())), dtype=torch.uint8).long()
    for _ in range(length):
        logits = await forward(text[None, -context:])
        likely = torch.softmax(logits[0, -1].float().cpu() / temperature, dim=-1)
        text = torch.cat((text, torch.multinomial(likely, 1, generator=draws)))
    return decode(text)
