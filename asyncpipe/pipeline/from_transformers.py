"""``from_transformers``: a pipeline of a Hugging Face model, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from asyncpipe.ops.model.transformers.cut import unit_balance
from asyncpipe.ops.model.transformers.dispatched import device_runs
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
    devices: Sequence[str | torch.device] | Sequence[Sequence[str | torch.device]] | None = None,
    microbatches: int,
    loss: Literal["chunked"] | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline of ``model``, a ``PreTrainedModel`` of transformers or a ``PeftModel`` around one.

    ``batch`` is an example of the mini-batches to come, as a tokenizer, an image processor or a data collator returns
    it. ``options`` are those of ``Pipeline``. The model is cut between its layers; ``balance`` is a list of layers per
    stage (embeddings are with the first, heads with the last), or ``"auto"``, which spreads parameters evenly, or with
    a ``sample`` time. A model of a family that is not known is traced, with the example.

    A model that was loaded with a ``device_map`` needs no ``devices``: accelerate's hooks are taken off, and its layers
    stay where they are, each run of them on one device as a stage. With a ``balance`` it is cut again, over the devices
    of its map; with ``devices`` over these. Layers of bitsandbytes train as they are, where they are.

    ``await pipe.step(batch)`` takes the labels from the batch, or as the target. The loss is the model's own, counted
    in labels that are not ignored, so it is that of the whole batch however this is padded and cut; one forward of the
    example in evaluation mode shows that it is. A ``loss_fn`` takes its place, and is given the model's output and the
    labels. ``result.outputs`` is the model's output without caches and hidden states: ``result.outputs.logits``.

    With ``loss="chunked"`` the logits of all tokens never exist: the loss makes those of some tokens at a time, with
    their gradients. It is for heads that predict tokens. Steps that train then return no outputs; others have the
    logits, unless ``return_outputs=False``. Raises ``OptionError`` for what a pipeline would get wrong.
    """
    staged = stage_transformers(model, batch, own_loss="loss_fn" not in options, loss_form=loss)
    if options.get("schedule") == "auto" and "sample" not in options:
        options["sample"] = (batch,)
    if devices is None:
        runs, units = device_runs(staged)
        devices = list(dict.fromkeys(runs)) if "balance" in options else runs
        options.setdefault("balance", units)
    balance = options.get("balance", "auto")
    if not isinstance(balance, str):
        options["balance"] = unit_balance(staged, balance)
    return Pipeline(staged, devices, microbatches=microbatches, **options)
