"""Compares one architecture, cut in every way, with its unsplit model."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from asyncpipe import Arguments, Pipeline, from_transformers, trace
from asyncpipe.errors import AsyncpipeError, TaskError
from asyncpipe.ops.model.microbatch import cut, without_no_chunk
from asyncpipe.ops.model.nested import flatten, leaves_of, places
from asyncpipe.ops.model.transformers.counted_loss import loss_kind
from asyncpipe.ops.model.transformers.families import find_trunks
from tests.campaigns.architectures.architecture import SAMPLES, Architecture
from tests.campaigns.architectures.in_float64 import in_float64
from tests.campaigns.harness import Verdict

__all__ = ["CELLS", "EVALUATION", "compared", "judge", "told"]

STAGES, MICROBATCHES = 3, 4
TOLERANCE = 1e-10
EVALUATION = ("eval", "-")
CELLS = [
    *((schedule, checkpoint) for schedule in ("1f1b", "zb-h1", "auto") for checkpoint in ("always", "never")),
    EVALUATION,
]
"""(schedule, what is recomputed) of each cell; and outputs in evaluation mode."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the unsplit model has computed."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    outputs: dict[str, Tensor]
    """In evaluation mode, by their places in what the model returns."""
    scale: float
    """One over the largest gradient, with which differences of gradients are multiplied."""


def judge(architecture: Architecture, cells: Sequence[tuple[str, str]] = CELLS) -> Iterator[str | Verdict]:
    """What is said of an architecture, and the verdict on each cell as soon as it is known."""
    with warnings.catch_warnings(), in_float64():
        warnings.simplefilter("ignore")
        model, batch = architecture.made()
        mixes = architecture.mixes or any(isinstance(module, _BatchNorm) for module in model.modules())
        expected = _unsplit(model, batch, mixes)
        fresh = deepcopy(model.state_dict())
        try:
            opened = _cut(model, batch)
        except Exception as error:  # noqa: BLE001 - the finding
            yield from [told(error)] * len(cells)
            return
        parameters = sum(parameter.numel() for parameter in model.parameters())
        against = "micro-batches" if mixes else "whole mini-batch"
        yield f"{architecture.name}: {parameters:,} parameters, cut by {opened.how}, compared with the {against}"
        for cell in cells:
            model.load_state_dict(fresh)
            model.zero_grad()
            try:
                found, largest = _differences(_run(opened, model, batch, cell), expected, cell)
                yield Verdict("wrong", "; ".join(found[:5])) if found else Verdict("right", f"{largest:.1e}")
            except Exception as error:  # noqa: BLE001 - the finding
                yield told(error)


def told(error: Exception) -> Verdict:
    """What is said of an error: it is a refusal, or something has crashed."""
    cause = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
    if isinstance(cause, AsyncpipeError) and not isinstance(cause, TaskError):
        return Verdict("refused", f"{type(cause).__name__}: {cause}")
    where = "".join(traceback.format_exception(cause)[-6:])
    return Verdict("error", f"{type(error).__name__} of {type(cause).__name__}: {cause}\n{where}")


# The loss


def loss_of(output: Any, *_: Any) -> Tensor:
    """The loss that the model has computed, or a mean over samples of something of all its outputs."""
    loss = getattr(output, "loss", None)
    if loss is None:
        leaves = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        loss = torch.stack([(leaf.sin() + 0.1 * leaf.square()).mean() for leaf in leaves]).sum()
    return loss


# The unsplit model


def _unsplit(model: nn.Module, batch: dict[str, Any], mixes: bool) -> Expected:
    """What ``model`` computes of ``batch``; micro-batch by micro-batch if it mixes samples. Leaves it as it was."""
    before = deepcopy(model.state_dict())
    pieces, weights = [without_no_chunk(batch)], [1.0]
    if mixes:
        made = cut(batch, MICROBATCHES)
        pieces, weights = made.pieces, [size / SAMPLES for size in made.sizes]
    losses = []
    for piece, weight in zip(pieces, weights, strict=True):
        loss = loss_of(model(**piece)) * weight
        loss.backward()
        losses.append(float(loss.detach()))
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    scale = 1 / max(float(g.abs().max()) for g in gradients.values() if g is not None)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(before)
    model.eval()
    with torch.no_grad():
        outputs = tensors(model(**without_no_chunk(batch)))
    model.train().zero_grad()
    return Expected(sum(losses), gradients, buffers, outputs, scale)


def tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of an output, by their places in it."""
    leaves, structure = flatten(output)
    found = zip(places(structure), leaves, strict=True)
    return {place: leaf for place, leaf in found if isinstance(leaf, Tensor)}


# The pipeline

Open = Callable[..., Pipeline]


class _Cut(NamedTuple):
    how: str
    open: Open
    """Makes a pipeline, with the options of a cell."""


def _cut(model: nn.Module, batch: dict[str, Any]) -> _Cut:
    """By structure, if the model is one of transformers whose structure is known; else by a trace."""
    if type(model).__module__.startswith("transformers."):
        # The loss is the model's own, counted in labels, where it has one that is known.
        options: dict[str, Any] = {} if "labels" in batch and loss_kind(model) else {"loss_fn": loss_of}
        opened = partial(from_transformers, model, batch, devices=DEVICES, **options)
        if find_trunks(model):
            opened(microbatches=MICROBATCHES)
            return _Cut("structure", opened)
    staged = trace(model, Arguments((), batch), STAGES)
    return _Cut("trace", partial(Pipeline, staged, DEVICES, loss_fn=loss_of))


DEVICES = [f"cpu:{k}" for k in range(STAGES)]


class _Observed(NamedTuple):
    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    outputs: dict[str, Tensor]


def _run(cut_model: _Cut, model: nn.Module, batch: dict[str, Any], cell: tuple[str, str]) -> _Observed:
    given = Arguments((), dict(batch))
    schedule, checkpoint = ("1f1b", "never") if cell == EVALUATION else cell
    options: dict[str, Any] = {"sample": (given,)} if schedule == "auto" else {}
    pipe = cut_model.open(microbatches=MICROBATCHES, schedule=schedule, checkpoint=checkpoint, **options)
    with pipe.sync() as opened:
        if cell == EVALUATION:
            opened.eval()
            with torch.no_grad():
                outputs = tensors(opened(**given.kwargs))
            opened.train()
            return _Observed(0.0, {}, {}, outputs)
        opened.train()
        result = opened.step(given, return_outputs=False)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return _Observed(float(result.loss), gradients, dict(model.named_buffers()), {})


def _differences(got: _Observed, expected: Expected, cell: tuple[str, str]) -> tuple[list[str], float]:
    """What is wrong, and the largest difference: of gradients, as a part of the model's largest one."""
    if cell == EVALUATION:
        # Models that are cut by structure return their logits, and the loss.
        said = {"['logits']"} & expected.outputs.keys() or expected.outputs.keys()
        found = [compared(f"output {place}", got.outputs.get(place), expected.outputs[place]) for place in said]
    else:
        losses = [torch.tensor(x, dtype=torch.float64) for x in (got.loss, expected.loss)]
        found = [compared("loss", *losses)]
        for name, theirs in expected.gradients.items():
            found.append(compared(f"gradient of {name}", got.gradients[name], theirs, expected.scale))
        found += [compared(f"buffer {name}", got.buffers[name], theirs) for name, theirs in expected.buffers.items()]
    return [text for text, _ in found if text], max(off for _, off in found)


def compared(name: str, ours: Tensor | None, theirs: Tensor | None, scale: float = 0.0) -> tuple[str, float]:
    """What is wrong, and the difference. ``None`` and zeros are the same."""
    ours = torch.zeros_like(theirs) if ours is None and theirs is not None and not theirs.any() else ours
    theirs = torch.zeros_like(ours) if theirs is None and ours is not None and not ours.any() else theirs
    if ours is None or theirs is None:
        if ours is theirs:
            return "", 0.0
        return f"{name} is {'missing' if ours is None else 'there'}, unlike the unsplit model's", math.inf
    if ours.shape != theirs.shape:
        return f"{name} has shape {list(ours.shape)}, not {list(theirs.shape)}", math.inf
    if not theirs.numel() or torch.equal(ours, theirs):
        return "", 0.0
    scale = scale or 1 / max(1.0, float(theirs.abs().max()))
    off = float((ours.double() - theirs.double()).abs().max()) * scale
    return f"{name} is off by {off:.2g}" if not off <= TOLERANCE else "", off
