"""Runs a case as a pipeline and unsplit, and compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from asyncpipe import Arguments, Microbatches, Pipeline
from asyncpipe.compat.torchgpipe import GPipe
from tests.campaigns.differential.judge import differences, told
from tests.campaigns.differential.reference import Observed
from tests.campaigns.harness import Verdict
from tests.campaigns.modules.cases import MICROBATCHES, Case, Given, build, deterministic, given

__all__ = ["judge"]

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
State = dict[str, Tensor]


def judge(case: Case) -> Verdict:
    """What became of a case."""
    with warnings.catch_warnings(), deterministic(case):
        warnings.simplefilter("ignore")
        return _judge(case)._replace(topic=case.name)


def _judge(case: Case) -> Verdict:
    batch = given(case)
    try:
        wanted = _unsplit(replace(case, schedule="", checkpoint=""))
    except Exception as error:  # noqa: BLE001 - a program that torch refuses is no case
        return Verdict("void", f"{type(error).__name__}: {error}")
    model, before = build(case, batch), {}
    try:
        got = _pipelined(case, batch, model, before)
    except Exception as error:  # noqa: BLE001 - a refusal, or the finding
        verdict = told(error)
        if verdict.outcome == "error":
            return verdict._replace(text=f"{case}: {verdict.text}", label="told, not refused")
        return verdict if _is_as(before, _state(model)) else Verdict("wrong", f"refused too late: {verdict.text}")
    found = list(differences(case, wanted, got))
    return Verdict("wrong", "\n".join([f"{case}: {found[0]}", *found[1:]])) if found else Verdict("right")


def _state(model: nn.Module) -> State:
    """What a step may change."""
    named = [*model.named_parameters(), *model.named_buffers()]
    gradients = [(f"gradient of {name}", p.grad) for name, p in model.named_parameters()]
    there = [(name, tensor) for name, tensor in [*named, *gradients] if tensor is not None and not is_lazy(tensor)]
    return {name: tensor.detach().clone() for name, tensor in there}


def _is_as(before: State, now: State) -> bool:
    return before.keys() == now.keys() and all(torch.equal(before[name], now[name]) for name in before)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over micro-batches, whose outputs are one number each."""
    return (output.unsqueeze(1) - target.view(len(output), -1)).square().mean()


def _inputs(batch: Given, case: Case) -> list[list[Tensor]]:
    """The tensors of the mini-batch as one list, or those of each micro-batch that is ready-made."""
    lists = batch.microbatches if batch.form == "ready-made" else [batch.batch()]
    lists = [[tensor.detach().clone() for tensor in each] for each in lists]
    for each in lists if case.face != "step" else []:
        for tensor, of in zip(each, batch.trained, strict=True):
            tensor.requires_grad_(of)
    return lists


def _saw(observed: Observed, model: nn.Module, inputs: list[list[Tensor]]) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    tensors = [tensor for each in inputs for tensor in each]
    gradients |= {f"input {number}": tensor.grad for number, tensor in enumerate(tensors)}
    copied = {name: gradient if gradient is None else gradient.clone() for name, gradient in gradients.items()}
    observed.gradients.append(copied)


# Unsplit


@lru_cache(maxsize=4)
def _unsplit(case: Case) -> Observed:
    """What the model does, micro-batch by micro-batch; the same for all schedules and recomputations."""
    batch = given(case)
    model, observed = build(case, batch), Observed()
    for kind in case.steps:
        inputs = _inputs(batch, case)
        model.train(kind == "train").zero_grad()
        outputs, losses = [], []
        for k, target in enumerate(batch.target().chunk(MICROBATCHES)):
            tensors = inputs[k] if batch.form == "ready-made" else [each.chunk(MICROBATCHES)[k] for each in inputs[0]]
            args, kwargs = batch.arguments(tensors)
            with nullcontext() if kind == "train" else torch.no_grad():
                output = model[2](model[1](model[0](*args, **kwargs)))
                loss = _loss(output, target)
            if kind == "train":
                (loss / MICROBATCHES).backward()
            outputs.append(output.detach())
            losses.append(loss.detach())
        observed.outputs.append([torch.cat(outputs)])
        observed.losses.append(torch.stack(losses).mean())
        if kind == "train":
            _saw(observed, model, inputs)
    _saw_end(observed, model)
    return observed


def _saw_end(observed: Observed, model: nn.Module) -> None:
    observed.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    observed.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}


# The pipeline

Step = Callable[[str, list[list[Tensor]]], tuple[Tensor, Tensor]]
"""Runs a step of a kind on these inputs: its loss and output."""


def _pipelined(case: Case, batch: Given, model: nn.Sequential, before: State) -> Observed:
    """What the pipeline does; ``before`` is the state ahead of the last step."""
    observed = Observed()
    before |= _state(model)
    with _opened(case, batch, model) as step:
        for kind in case.steps:
            inputs = _inputs(batch, case)
            model.zero_grad()
            before.clear()
            before |= _state(model)
            with nullcontext() if kind == "train" else torch.no_grad():
                loss, output = step(kind, inputs)
            observed.outputs.append([output.detach()])
            observed.losses.append(loss.detach())
            if kind == "train":
                _saw(observed, model, inputs)
    _saw_end(observed, model)
    return observed


@contextmanager
def _opened(case: Case, batch: Given, model: nn.Sequential) -> Iterator[Step]:
    if case.face == "gpipe":
        dropped_in = GPipe(model, [1, 1, 1], devices=["cpu"] * 3, chunks=MICROBATCHES, checkpoint=case.checkpoint)

        def called(kind: str, inputs: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
            dropped_in.train(kind == "train")
            return _with_loss(dropped_in(inputs[0][0] if len(inputs[0]) == 1 else tuple(inputs[0])), batch)

        yield called
        return
    options: dict[str, Any] = {"schedule": case.schedule, "checkpoint": case.checkpoint, "balance": [1, 1, 1]}
    if case.face == "step":
        options["loss_fn"] = _loss
    with Pipeline(model, DEVICES, microbatches=MICROBATCHES, **options).sync() as pipe:

        def stepped(kind: str, inputs: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
            pipe.train(kind == "train")
            pieces = [Arguments(*batch.arguments(tensors)) for tensors in inputs]
            is_ready_made = batch.form == "ready-made"
            if case.face == "step":
                x = Microbatches(pieces) if is_ready_made else pieces[0]
                target = batch.target()
                result = pipe.step(x, Microbatches(target.chunk(MICROBATCHES)) if is_ready_made else target)
                return result.loss, torch.cat(result.outputs) if is_ready_made else result.outputs
            if is_ready_made:
                return _with_loss(torch.cat(pipe(Microbatches(pieces))), batch)
            return _with_loss(pipe(*pieces[0].args, **pieces[0].kwargs), batch)

        yield stepped


def _with_loss(output: Tensor, batch: Given) -> tuple[Tensor, Tensor]:
    loss = _loss(output, batch.target())
    if torch.is_grad_enabled():
        loss.backward()
    return loss, output
