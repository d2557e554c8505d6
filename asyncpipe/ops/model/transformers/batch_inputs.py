"""What each stage takes of a batch as tokenizers, image processors and data collators return it."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from asyncpipe.errors import BatchError
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.transformers.generation import TURN
from asyncpipe.ops.model.transformers.layer_run import LayerRange

__all__ = ["LABELS", "BatchInputs", "label_names", "model_inputs", "stage_inputs"]

LABELS = "labels"

_SWITCHED_OFF = {
    "use_cache": "a pipeline trains and keeps no cache; use the model itself to generate",
    "past_key_values": "a pipeline keeps no cache; use the model itself to generate",
    "output_attentions": "a pipeline's output has the logits alone; call the model itself to look inside",
    "output_hidden_states": "a pipeline's output has the logits alone; call the model itself to look inside",
    "output_router_logits": "set it in the model's config, for the auxiliary loss of routers",
    "num_items_in_batch": "it is an argument of the step: pipe.step(batch, num_items_in_batch=...)",
    "encoder_outputs": "the encoder is part of the pipeline; give input_ids",
    "is_causal": "set it in the model's config",
}


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """By stage, the arguments of a micro-batch that it takes."""

    model: Any
    dropped: Sequence[frozenset[str]]
    """By stage: the arguments that it does without."""
    has_loss: bool
    """Whether somebody computes a loss of labels in a batch."""

    def __call__(self, arguments: Arguments) -> dict[int, Any]:
        """Raises ``BatchError`` for arguments that the model does not take, or that a pipeline cannot follow."""
        # What ``generate`` gives is what the model takes.
        generates = TURN in arguments.kwargs
        inputs = arguments.kwargs if generates else model_inputs(self.model, arguments, has_loss=self.has_loss)
        taken: dict[int, Any] = {}
        for stage, dropped in enumerate(self.dropped):
            mine = {name: value for name, value in inputs.items() if name not in dropped}
            if mine:
                taken[stage] = mine
        return taken


def stage_inputs(
    model: nn.Module, stages: Sequence[Sequence[LayerRange]], trunks: int, *, has_loss: bool
) -> BatchInputs:
    """What ``stages`` take, each of these ranges of layers."""
    dropped = []
    for number, ranges in enumerate(stages):
        firsts = {each.trunk for each in ranges if each.has_first}
        names: set[str] = set()
        if 0 not in firsts:
            names |= {"input_ids", "inputs_embeds", "pixel_values", "bool_masked_pos"}
            if trunks == 1 and number == len(stages) - 1:
                names.remove("input_ids")  # Heads look for the last token that is no padding.
        if 1 not in firsts:
            names |= {"decoder_input_ids", "decoder_inputs_embeds"}
        if all(each.trunk == 0 for each in ranges):
            names.add("decoder_attention_mask")
        if all(each.trunk == 1 for each in ranges):
            names.add("input_features")
        dropped.append(frozenset(names))
    return BatchInputs(model, tuple(dropped), has_loss)


def model_inputs(model: Any, arguments: Arguments, *, has_loss: bool) -> dict[str, Any]:
    """The arguments that ``model`` is called with to get its output: without labels, with what a decoder makes of them.

    Raises ``BatchError``; also for labels if nobody computes a loss of them.
    """
    inputs = _named_inputs(model, arguments)
    found = {name: inputs.pop(name, None) for name in label_names(model)}
    labels = found.get(LABELS)
    if any(each is not None for each in found.values()) and not has_loss:
        raise BatchError(
            f"how {type(model).__name__} computes its loss of labels is not known; give the pipeline a loss_fn, which "
            "gets (output, labels), or leave the labels out"
        )
    has_decoder = "decoder_input_ids" in signature(model.forward).parameters
    if has_decoder and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
        if labels is not None and hasattr(model, "prepare_decoder_input_ids_from_labels"):
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        elif labels is not None and shift is not None:  # Whisper
            ends = model.config.pad_token_id, model.config.decoder_start_token_id
            inputs["decoder_input_ids"] = shift(labels, *ends)
        else:
            raise BatchError("the batch has no decoder_input_ids, and no labels that they follow from")
    return inputs


def label_names(model: Any) -> tuple[str, ...]:
    """What ``model`` calls its labels, as the library's Trainer finds it out."""
    others = ("start_positions", "end_positions")
    found = tuple(name for name in signature(model.forward).parameters if "label" in name or name in others)
    return found or (LABELS,)


def _named_inputs(model: nn.Module, arguments: Arguments) -> dict[str, Any]:
    """The arguments of a call of ``model`` by name, without those that are ``None``; ``BatchError`` if they do not fit.

    A dict or ``UserDict`` alone stands for keyword arguments.
    """
    args, kwargs = arguments
    if len(args) == 1 and not kwargs:
        batch: Any = args[0]
        if isinstance(batch, Mapping | UserDict):
            args, kwargs = (), dict(batch)
    parameters = signature(model.forward).parameters
    name = type(model).__name__
    if len(args) > len(parameters):
        raise BatchError(f"{name} was given {len(args)} arguments; give a batch by name, as a tokenizer returns it")
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    is_open = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    inputs: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SWITCHED_OFF:
            if value is not None and value is not False:
                raise BatchError(f"{key} in the batch: {_SWITCHED_OFF[key]}; leave it out")
        elif key == "return_dict":
            if value is False:
                raise BatchError("return_dict=False in the batch: a pipeline returns what the model does with True")
        elif key not in parameters and not is_open:
            known = ", ".join(each for each in parameters if each not in _SWITCHED_OFF)
            raise BatchError(f"{name} takes no {key!r}; it takes {known}")
        elif isinstance(value, list):
            raise BatchError(
                f"{key} is a list; have the tokenizer or the collator return tensors (return_tensors='pt')"
            )
        elif value is not None:
            inputs[key] = value
    _refuse_rows_of_flash(model, inputs)
    if not any(isinstance(value, torch.Tensor) for value in inputs.values()):
        raise BatchError(f"the batch has no tensor; give {name} what its tokenizer or processor returns")
    return inputs


def _refuse_rows_of_flash(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise ``BatchError`` for packed sequences that FlashAttention would not tell apart."""
    positions = inputs.get("position_ids")
    flash = "flash" in (getattr(model.config, "_attn_implementation", None) or "")
    if not flash or positions is None or len(positions) == 1 or "attention_mask" in inputs:
        return
    if bool((positions.diff() != 1).any()):
        raise BatchError(
            f"{type(model).__name__} with FlashAttention tells packed sequences apart only in a row by itself, and a "
            f"micro-batch has {len(positions)}; use as many micro-batches as rows, or attn_implementation='sdpa'"
        )
