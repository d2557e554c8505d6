"""Text as tokens, for the built-in entry of language models: files, what turns text into tokens, and batches.

A text file is one stream, of which samples are windows; the lines of a JSONL file are samples, cut and padded::

    corpus.txt     t t t t t t t t t t t t │ t t t        windows at random places │ held out
    lines.jsonl    {"text": …}  {"text": …}  │ {"text": …}  lines in random order, each once an epoch │ held out

Lines may be packed: then a sample is a row of several.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.packing import IGNORED, pack
from asyncpipe.train.workload import Batch

__all__ = ["BytesAsTokens", "Lines", "PackedLines", "TokenData", "Tokens", "Windows", "read_data"]

HELD_OUT_BATCHES = 8


class Tokens(Protocol):
    """Turns text into tokens and back."""

    @property
    def size(self) -> int:
        """How many tokens there are."""

    def encode(self, text: str) -> Tensor:
        """The tokens of ``text``, one dimension."""

    def decode(self, tokens: Tensor) -> str:
        """The text of ``tokens``."""


class BytesAsTokens:
    """Each byte of UTF-8 is a token."""

    size = 256

    def encode(self, text: str) -> Tensor:
        """The bytes."""
        return torch.tensor(list(text.encode()), dtype=torch.long)

    def decode(self, tokens: Tensor) -> str:
        """The text; bytes that are no UTF-8 as replacement characters."""
        return bytes(tokens.tolist()).decode(errors="replace")


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one stream, with the names of the model's arguments, and the labels."""

    train: Tensor
    rest: Tensor
    length: int
    memoryless = True

    @property
    def tokens_per_sample(self) -> int:
        """The mean number of tokens of a sample."""
        return self.length

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        while True:
            starts = torch.randint(len(self.train) - self.length + 1, (batch_size,), generator=generator)
            yield self._cut(self.train, starts)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        last = len(self.rest) - self.length
        starts = torch.linspace(0, last, min(last + 1, HELD_OUT_BATCHES * batch_size)).long()
        for first in range(0, len(starts), batch_size):
            yield self._cut(self.rest, starts[first : first + batch_size])

    def prompt(self) -> Tensor:
        """Some held-out tokens to begin a sample with."""
        return self.rest[: self.length // 2]

    def _cut(self, tokens: Tensor, starts: Tensor) -> Batch:
        windows = tokens[starts[:, None] + torch.arange(self.length)]
        return {"input_ids": windows}, windows


@dataclass(frozen=True, eq=False)
class Lines:
    """The same of samples of different lengths, padded on the right to the longest of their batch."""

    train: Sequence[Tensor]
    rest: Sequence[Tensor]
    length: int
    memoryless = False

    @property
    def tokens_per_sample(self) -> int:
        return max(1, round(sum(map(len, self.train)) / len(self.train)))

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        while True:
            order = torch.randperm(len(self.train), generator=generator).tolist()
            for first in range(0, len(order), batch_size):
                yield self._padded([self.train[number] for number in order[first : first + batch_size]])

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        for first in range(0, min(len(self.rest), HELD_OUT_BATCHES * batch_size), batch_size):
            yield self._padded(self.rest[first : first + batch_size])

    def prompt(self) -> Tensor:
        return self.rest[0][: max(1, len(self.rest[0]) // 2)]

    def _padded(self, samples: Sequence[Tensor]) -> Batch:
        def padded(rows: Sequence[Tensor], value: int) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)

        mask = padded([torch.ones_like(sample) for sample in samples], 0)
        return {"input_ids": padded(samples, 0), "attention_mask": mask}, padded(samples, IGNORED)


@dataclass(frozen=True, eq=False)
class PackedLines:
    """The same of several samples in a row, without padding between them (``pack``)."""

    train: Mapping[str, Tensor]
    rest: Mapping[str, Tensor]
    length: int
    memoryless = False

    @property
    def tokens_per_sample(self) -> int:
        return self.length

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        while True:
            for rows in torch.randperm(len(self.train["labels"]), generator=generator).split(batch_size):  # type: ignore[no-untyped-call]
                yield self._taken(self.train, rows)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        count = min(len(self.rest["labels"]), HELD_OUT_BATCHES * batch_size)
        for rows in torch.arange(count).split(batch_size):  # type: ignore[no-untyped-call]
            yield self._taken(self.rest, rows)

    def prompt(self) -> Tensor:
        row = self.rest["input_ids"][0]
        ends = (self.rest["position_ids"][0] == 0).nonzero().flatten().tolist()
        return row[: max(1, (ends[1] if len(ends) > 1 else len(row)) // 2)]

    def _taken(self, data: Mapping[str, Tensor], rows: Tensor) -> Batch:
        batch = {name: values[rows] for name, values in data.items()}
        return batch, batch.pop("labels")


TokenData = Windows | Lines | PackedLines
"""Endless ``batches`` for training, drawn by a generator, and the same few ``held_out`` ones each time."""


def read_data(
    path: Path, tokens: Tokens, *, length: int, held_out: float, field: str, packed: bool = False
) -> TokenData:
    """The data in the file at ``path``: the lines of a ``.jsonl`` file, each with a text in ``field``, or one text.

    Samples have at most ``length`` tokens; ``packed`` are lines in rows of that length. The last part of the
    file, ``held_out`` of it, is kept for evaluation. Raises ``OptionError`` for a file that cannot be read, is
    damaged, or is too short.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"data: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"data: {path} is not UTF-8: {error}") from error
    if path.suffix == ".jsonl":
        lines = _lines(path, text, tokens, length, held_out, field)
        return PackedLines(pack(lines.train, length), pack(lines.rest, length), length) if packed else lines
    if packed:
        raise OptionError(f"pack: {path} is one text, whose samples are full already; only lines (.jsonl) are packed")
    stream = tokens.encode(text)
    kept = max(length, round(len(stream) * held_out))
    if len(stream) - kept < length:
        raise OptionError(
            f"data: {path} is too short: it has {len(stream):,} tokens, and training and evaluation need a sample of "
            f"{length:,} each; give a longer text, or a smaller length"
        )
    return Windows(stream[:-kept], stream[-kept:], length)


def _lines(path: Path, text: str, tokens: Tokens, length: int, held_out: float, field: str) -> Lines:
    samples = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise OptionError(f"data: {path}, line {number} is not JSON: {error}") from error
        content = row.get(field) if isinstance(row, dict) else None
        if not isinstance(content, str):
            raise OptionError(f"data: {path}, line {number} has no text in {field!r}; say which field has it: field")
        sample = tokens.encode(content)[:length]
        if len(sample) > 1:  # The label of a token is the next one.
            samples.append(sample)
    kept = max(1, round(len(samples) * held_out))
    if len(samples) - kept < 1:
        raise OptionError(
            f"data: {path} is too short: it has {len(samples)} samples of at least two tokens, and training and "
            "evaluation need one each"
        )
    return Lines(samples[:-kept], samples[-kept:], length)
