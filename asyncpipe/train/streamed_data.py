"""A data set that is read while it is trained on, for the built-in entry of language models: a stream of ``datasets``.

Its texts follow one another in one stream of tokens, of which samples are consecutive windows::

    text 0        text 1   text 2 …                    the first texts are held out
    t t t t t t│t t t t t t│t t                        a position: where the stream is read, and the tokens left over

The order is that of the data set, epoch after epoch: a buffer that shuffles a stream cannot be restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from asyncpipe.errors import OptionError, missing_package
from asyncpipe.train.token_data import Tokens, Windows
from asyncpipe.train.workload import Batch

__all__ = ["StreamedText", "stream_text"]

HELD_OUT_WINDOWS = 64


class StreamedText:
    """Endless ``batches`` of a stream of texts, whose position can be saved, and held-out ones of its beginning."""

    memoryless = False

    def __init__(self, texts: Any, beginning: Windows, tokens: Tokens, field: str) -> None:
        """``texts`` is an ``IterableDataset`` without the texts of ``beginning``."""
        self._texts = texts
        self._tokens = tokens
        self._field = field
        self.length = self.tokens_per_sample = beginning.length
        self.held_out = beginning.held_out
        self.prompt = beginning.prompt

    def batches(self, batch_size: int, generator: Generator) -> _StreamedBatches:
        """Mini-batches in the order of the stream. Nothing is drawn."""
        return _StreamedBatches(self._texts, self._encoded, self.length, batch_size)

    def _encoded(self, row: Mapping[str, Any]) -> Tensor:
        return _encoded(row, self._tokens, self._field)


class _StreamedBatches:
    def __init__(self, texts: Any, encoded: Any, length: int, batch_size: int) -> None:
        self._texts = texts
        self._encoded = encoded
        self._length = length
        self._taken = length * batch_size
        self._epoch = 0
        self._left = torch.empty(0, dtype=torch.long)
        """Tokens that were read and are in no batch yet."""

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._texts.set_epoch(self._epoch)
            for row in self._texts:
                self._left = torch.cat((self._left, self._encoded(row)))
                while len(self._left) >= self._taken:
                    windows = self._left[: self._taken].reshape(-1, self._length)
                    self._left = self._left[self._taken :].clone()
                    yield {"input_ids": windows}, windows
            self._epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"texts": self._texts.state_dict(), "epoch": self._epoch, "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._texts.load_state_dict(state["texts"])
        self._epoch, self._left = state["epoch"], state["left"]


def stream_text(given: Mapping[str, Any], tokens: Tokens, *, length: int, field: str) -> StreamedText:
    """The data set that ``datasets.load_dataset`` finds for the arguments ``given``, streamed; its split is ``train``.

    The first texts are held out, as many as give 64 samples for evaluation. Raises ``OptionError`` if there is no such
    data set, or no text is left. Blocks while it reads these.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise missing_package("dataset needs the package datasets", "datasets") from error
    try:
        texts = load_dataset(**{"split": "train", **given}, streaming=True)
        held, count = [], 0
        for row in texts:
            held.append(_encoded(row, tokens, field))
            count += len(held[-1])
            if count >= HELD_OUT_WINDOWS * length:
                break
        rest = texts.skip(len(held))
        if next(iter(rest), None) is None:
            raise OptionError(
                f"dataset: it has {len(held)} texts with {count:,} tokens, which are all needed for the evaluation "
                f"({HELD_OUT_WINDOWS} samples of {length:,}); give a larger one, or a smaller length"
            )
    except OptionError:
        raise
    except Exception as error:  # Each loader has errors of its own.
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OptionError(f"dataset: {dict(given)} cannot be read: {line}") from error
    beginning = torch.cat(held)
    return StreamedText(rest, Windows(beginning, beginning, length), tokens, field)


def _encoded(row: Mapping[str, Any], tokens: Tokens, field: str) -> Tensor:
    text = row.get(field)
    if not isinstance(text, str):
        raise OptionError(f"dataset: a row has no text in {field!r}, but {sorted(row)}; say which has it: field")
    return tokens.encode(text)
