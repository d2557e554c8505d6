"""``from_transformers``: a pipeline of a Hugging Face model, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import BalanceError
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.transformers.cut import even_units, unit_balance
from asyncpipe.ops.model.transformers.stage_transformers import stage_transformers
from asyncpipe.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["from_transformers"]


def from_transformers(
    model: nn.Module,
    batch: Any,
    *,
    devices: Sequence[str | torch.device],
    microbatches: int,
    **options: Any,
) -> Pipeline:
    """A pipeline of ``model``, a ``PreTrainedModel`` of transformers or a ``PeftModel`` around one.

    ``batch`` is an example of the mini-batches to come, as a tokenizer, an image processor or a data collator returns
    it. ``options`` are those of ``Pipeline``. The model is cut between its layers; ``balance`` is a list of layers per
    stage (embeddings are with the first, heads with the last), or ``"auto"``, which spreads parameters evenly, or with
    a ``sample`` time. A model of a family that is not known is traced, with the example.

    ``await pipe.step(batch)`` takes the labels from the batch, or as the target. The loss is the model's own, counted
    in labels that are not ignored, so it is that of the whole batch however this is padded and cut; a ``loss_fn`` takes
    its place, and is given the model's output and the labels. ``result.outputs`` is the model's output without caches
    and hidden states: ``result.outputs.logits``. Raises ``OptionError`` for what a pipeline would get wrong.
    """
    staged = stage_transformers(model, batch, own_loss="loss_fn" not in options)
    if options.get("schedule") == "auto" and "sample" not in options:
        options["sample"] = (batch,)
    if options.get("sample") is None:
        count = options.pop("stages", None)
        options["balance"] = _balance(staged, options.get("balance", "auto"), count, len(devices), options)
    return Pipeline(staged, devices, microbatches=microbatches, **options)


def _balance(
    staged: StagedModel, balance: str | Sequence[int], stages: int | None, devices: int, options: dict[str, Any]
) -> list[int]:
    if not isinstance(balance, str):
        if stages not in (None, len(balance)):
            raise BalanceError(
                f"balance {list(balance)} has {len(balance)} entries for {stages} stages; give one a stage"
            )
        return unit_balance(staged, balance)
    if balance != "auto":
        raise BalanceError(f"balance must be 'auto' or a list of integers, got {balance!r}")
    schedule = find_schedule(options.get("schedule", "1f1b"), order=options.get("order", "strict"))
    return even_units(staged, devices * schedule.virtual if stages is None else stages)
