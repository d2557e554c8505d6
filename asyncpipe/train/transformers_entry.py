"""The built-in entry of ``model = "transformers"``: a causal language model from its config, and text to train it with.

::

    [job]
    model = "transformers"
    [job.parameters]
    config = {model_type = "llama", hidden_size = 256, num_hidden_layers = 8, num_attention_heads = 8}
    data = "corpus.txt"             # or lines.jsonl
    save = "runs/my-llama"          # AutoModelForCausalLM.from_pretrained("runs/my-llama") reads it

transformers (the extra ``transformers``) is imported when the job begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from asyncpipe.core.checks import check_positive, similar
from asyncpipe.errors import OptionError, missing_package
from asyncpipe.ops.model.flops import count_flops
from asyncpipe.ops.model.packing import pack as pack_rows
from asyncpipe.ops.model.transformers.stage_transformers import stage_transformers
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.streamed_data import StreamedText, stream_text
from asyncpipe.train.token_data import BytesAsTokens, TokenData, Tokens, read_data
from asyncpipe.train.workload import Batch, Forward, Workload

__all__ = ["build"]

_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def build(
    config: str | Mapping[str, Any],
    data: str | None = None,
    *,
    dataset: Mapping[str, Any] | None = None,
    pack: bool = False,
    tokenizer: str | None = None,
    length: int = 128,
    held_out: float = 0.1,
    field: str = "text",
    save: str | None = None,
    sample: int = 0,
) -> Workload:
    """A causal language model and its text.

    ``config`` is a table with a ``model_type`` and keys of that type's config, or a folder with a ``config.json`` and,
    to go on from them, weights. ``data`` is a text file, or a ``.jsonl`` file with a text in ``field`` of each line;
    with ``pack`` rows of ``length`` have several lines each, which do not see each other, and no padding. ``dataset``
    in its place is a table of arguments for ``datasets.load_dataset``, whose texts are read while the job trains.
    ``tokenizer`` is a folder that ``save_pretrained`` of a tokenizer wrote; without it bytes are tokens. A sample has
    at most ``length`` tokens; the last part of the data, ``held_out`` of it, is for the evaluation. A run that ends
    writes the model to the folder ``save``, and shows ``sample`` tokens that it generates. Relative paths are relative
    to the working directory. Raises ``OptionError``.
    """
    check_positive("length", length - 1)
    if not 0 < held_out < 1:
        raise OptionError(f"held_out must be a part of the data, more than 0 and less than 1, got {held_out!r}")
    if save is not None and Path(save).exists() and not Path(save).is_dir():
        raise OptionError(f"save: {save} is a file; give a folder")
    tokens = BytesAsTokens() if tokenizer is None else _FolderTokens(tokenizer)
    made = _folder_config(config) if isinstance(config, str) else _made_config(config, tokens)
    _check_fit(made, tokens, length)
    if (data is None) == (dataset is None) or (pack and data is None):
        raise OptionError("give data, a file, or dataset, arguments for datasets.load_dataset; pack is for data")
    text: TokenData | StreamedText
    if dataset is not None:
        text = stream_text(dataset, tokens, length=length, field=field)
    else:
        text = read_data(Path(data or ""), tokens, length=length, held_out=held_out, field=field, packed=pack)
    model = _model(made, config)
    if pack:
        _check_packed(model, length)
    example, _ = next(text.held_out(2))
    staged = stage_transformers(model, example)
    if staged.own_loss is None:
        raise OptionError(f"{type(model).__name__} has no loss that can be counted in tokens, which this job needs")
    return Workload(
        model=staged,
        loss_fn=staged.own_loss,
        batches=text.batches,
        tokens_per_sample=text.tokens_per_sample,
        held_out=text.held_out,
        weight=_label_count,
        sample=partial(_generate, tokens=tokens, text=text, count=sample) if sample else None,
        memoryless=text.memoryless,
        flops=count_flops(model, example),
        finish=None if save is None else partial(_save, folder=Path(save), tokens=tokens),
    )


def _label_count(batch: Batch) -> float:
    """How many tokens the loss of a batch is the mean of."""
    _, labels = batch
    return float((labels[:, 1:] >= 0).sum())


async def _generate(forward: Forward, *, tokens: Tokens, text: TokenData | StreamedText, count: int) -> str:
    """A held-out beginning and the likeliest ``count`` tokens that follow."""
    found = text.prompt()
    for _ in range(count):
        output = await forward({"input_ids": found[None, -text.length :]})
        found = torch.cat((found, output.logits[0, -1].argmax().cpu()[None]))
    return tokens.decode(found)


def _save(pipe: Pipeline, *, folder: Path, tokens: Tokens) -> Path:
    try:
        pipe.save_pretrained(folder)
        if isinstance(tokens, _FolderTokens):
            tokens.save(folder)
    except OSError as error:
        raise OptionError(f"save: {folder} cannot be written: {error.strerror or error}") from error
    return folder


# Transformers


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise missing_package('model = "transformers" needs transformers', "transformers") from error
    return transformers


class _FolderTokens:
    """A tokenizer that was saved to a folder."""

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise OptionError(f"tokenizer: there is no folder {folder}; leave it out to train on bytes")
        with _explained(f"tokenizer: {folder} has none that can be read", OSError, ValueError):
            self.tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.size = len(self.tokenizer)

    def encode(self, text: str) -> Tensor:
        """The tokens, without the special ones that a tokenizer adds around a text."""
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(found, dtype=torch.long)

    def decode(self, tokens: Tensor) -> str:
        """The text."""
        return str(self.tokenizer.decode(tokens.tolist()))

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside the model."""
        self.tokenizer.save_pretrained(folder)


def _made_config(given: Mapping[str, Any], tokens: Tokens) -> Any:
    """The config of a table, whose keys must be those of its type: a wrong one would be kept and do nothing."""
    known = _transformers().CONFIG_MAPPING
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        wanted = "config.model_type: missing" if kind is None else f"config.model_type: unknown: {kind!r}"
        raise OptionError(f"{wanted}; {similar(str(kind), list(known))}give one of transformers, as 'llama' or 'gpt2'")
    values = {key: value for key, value in given.items() if key != "model_type"}
    default = known[kind]()
    for key in values:
        if not hasattr(default, key):
            raise OptionError(
                f"config.{key}: a config of {kind} has no such key; {similar(key, list(default.to_dict()))}"
            )
    names = getattr(tokens, "tokenizer", None)
    ends = {key: getattr(names, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    own = {"vocab_size": tokens.size, "use_cache": False, **ends}
    own = {key: value for key, value in own.items() if hasattr(default, key)}
    with _explained(f"config: not one of {kind}", Exception):  # Configs check their values in many ways.
        return known[kind](**{**own, **values})


def _folder_config(folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise OptionError(f"config: {folder} is no folder with a config.json; give one, or a table with a model_type")
    with _explained(f"config: {folder}/config.json cannot be used", OSError, ValueError):
        return _transformers().AutoConfig.from_pretrained(folder, local_files_only=True, use_cache=False)


def _check_fit(config: Any, tokens: Tokens, length: int) -> None:
    size = getattr(config, "vocab_size", tokens.size)
    if size < tokens.size:
        raise OptionError(
            f"config.vocab_size: must be at least {tokens.size:,}, the tokens that there are, got {size:,}"
        )
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < length:
        raise OptionError(f"length: the model has {most:,} positions (max_position_embeddings), got {length:,}")


def _check_packed(model: Any, length: int) -> None:
    """Raise ``OptionError`` if sequences that are packed in a row see each other in ``model``."""
    if "flash" in (model.config._attn_implementation or ""):
        return  # It tells sequences apart by their positions, in rows by themselves, which steps check.
    generator = Generator().manual_seed(0)
    samples = [torch.randint(2, (size,), generator=generator) for size in (length - length // 2, length // 2)]
    row = {name: value for name, value in pack_rows(samples, length).items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        packed, alone = model(**row).logits[0, -(length // 2) :], model(samples[1][None]).logits[0]
    model.train()
    if not torch.allclose(packed, alone, rtol=1e-3, atol=1e-4):
        raise OptionError(f"pack: in {type(model).__name__} sequences of a row see each other; leave pack out")


def _model(config: Any, given: str | Mapping[str, Any]) -> Any:
    auto = _transformers().AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if config.model_type not in NAMES:
        raise OptionError(
            f"config.model_type: transformers has no causal language model of type {config.model_type!r}, which this "
            "job trains; write an entry for another model"
        )
    with (
        _explained(f"config: no {config.model_type} can be made of this config", ValueError, TypeError, RuntimeError),
        _explained(f"config: the weights in {given} cannot be read", OSError),
    ):
        if isinstance(given, str) and any(any(Path(given).glob(pattern)) for pattern in _WEIGHTS):
            return auto.from_pretrained(given, config=config, local_files_only=True)
        return auto.from_config(config)


@contextmanager
def _explained(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these ``kinds`` in the block into an ``OptionError`` with the ``problem`` and their first line."""
    try:
        yield
    except OptionError:
        raise
    except kinds as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OptionError(f"{problem}: {line}") from error
