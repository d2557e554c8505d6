"""Compares a pipeline with the unsplit model."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncpipe.errors import AsyncpipeError, TaskError
from tests.campaigns.differential.cases import Case, build, sizes
from tests.campaigns.differential.hooks import MODULE_HOOKS
from tests.campaigns.differential.reference import Observed, run_unsplit
from tests.campaigns.differential.runs import direction, loss_at, run_pipelined, trained
from tests.campaigns.harness import Verdict

TOLERANCE = 1e-10
FLOAT, BFLOAT = 1e-5, 4e-2
STEP = 1e-6
OF_DERIVATIVES = 1e-5


def judge(case: Case) -> Verdict:
    """Run a case both ways. The unsplit model of a case with draws is the same split, run in the simplest way."""
    torch.manual_seed(case.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _judge(case)
        finally:
            if "slow" in case.tags:
                torch._dynamo.reset()


def _judge(case: Case) -> Verdict:
    draws = "draws" in case.tags
    try:
        wanted = run_unsplit(case)
    except Exception as error:  # noqa: BLE001 - a program that torch refuses is no case
        return Verdict("void", f"{type(error).__name__}: {error}")
    try:
        got = run_pipelined(case)
        if draws:
            simple = replace(case, schedule="gpipe", devices=case.stages, checkpoint="never")
            wanted = run_pipelined(replace(simple, options=tuple(o for o in case.options if o != "hint")))
    except Exception as error:  # noqa: BLE001 - a refusal, or the finding
        return told(error)
    found = list(differences(case, wanted, got))
    if draws and not found:
        found += _derivative(case, got)
    return Verdict("wrong", "\n".join(found)) if found else Verdict("right")


def told(error: Exception) -> Verdict:
    """A refusal if it is an error of ours, or a task's that has such a one as its cause; a finding otherwise."""
    cause = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
    if isinstance(cause, AsyncpipeError) and not isinstance(cause, TaskError):
        return Verdict("refused", f"{type(cause).__name__}: {cause}")
    where = "".join(traceback.format_exception(cause))
    line = str(cause).splitlines()[0] if str(cause) else ""
    return Verdict("error", f"{type(error).__name__} of {type(cause).__name__}: {line}\n{where}")


def differences(case: Any, wanted: Observed, got: Observed) -> Iterator[str]:
    """Where they are unlike, in lines. Of the case it asks for its steps, options and tags."""
    tolerance = BFLOAT if "autocast" in case.options else FLOAT if "float" in case.tags else TOLERANCE
    for step, (ours, theirs) in enumerate(zip(got.losses, wanted.losses, strict=True)):
        yield from _compared(f"loss of step {step}", {"": theirs}, {"": ours}, tolerance)
    if "no outputs" not in case.options:
        for step, (mine, its) in enumerate(zip(got.outputs, wanted.outputs, strict=True)):
            yield from _compared(f"output of step {step}", _numbered(its), _numbered(mine), tolerance)
    for step, (mine, its) in enumerate(zip(got.gradients, wanted.gradients, strict=True)):
        # In half precision, a gradient that is zero but for rounding has the rounding of the others behind it.
        least = _largest(its.values()) if "autocast" in case.options else 1.0
        yield from _compared(f"gradient of step {step}", its, mine, tolerance, least)
    yield from _compared("buffer", wanted.buffers, got.buffers, tolerance)
    yield from _compared("parameter", wanted.parameters, got.parameters, tolerance)
    for name in sorted({*wanted.calls, *got.calls}):
        if wanted.calls.get(name, 0) != got.calls.get(name, 0):
            yield f"hook called: {name} {got.calls.get(name, 0)} times, not {wanted.calls.get(name, 0)}"
    for name, count in got.repeated.items():
        most = len(sizes(case)) * len(case.steps) * 2
        if count > most or not name.endswith(MODULE_HOOKS):
            yield f"hook called by recomputations: {name} {count} times"


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def _compared(
    what: str,
    wanted: Mapping[str, Tensor | None],
    got: Mapping[str, Tensor | None],
    tolerance: float,
    least: float = 1.0,
) -> Iterator[str]:
    for name in [*wanted, *(name for name in got if name not in wanted)]:
        theirs, ours = wanted.get(name), got.get(name)
        if theirs is None and ours is None:
            continue
        if theirs is None or ours is None:
            if theirs is None and ours is not None and not ours.any():
                continue  # Zeros where the unsplit model has no gradient.
            yield f"{what}: {name} is {'missing' if ours is None else 'there'}, unlike the unsplit model's"
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            yield f"{what}: {name} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
            continue
        if torch.equal(ours, theirs) or not theirs.numel():
            continue
        off = (ours - theirs).abs()
        scale = max(least, _largest([theirs]))
        if bool((ours.isnan() != theirs.isnan()).any()) or float(off.nan_to_num().max()) > tolerance * scale:
            yield f"{what}: {name} is off by {float(off.nan_to_num().max()):.3g} of {scale:.3g}"


def _largest(tensors: Iterable[Tensor | None]) -> float:
    """Their largest value, at least 1."""
    return max([1.0, *(float(each.abs().nan_to_num().max()) for each in tensors if each is not None and each.numel())])


def _derivative(case: Case, got: Observed) -> list[str]:
    """Whether the gradients of the first step are those of the loss that the same draws give."""
    if case.tags & {"detached", "float"} or case.hooks or "autocast" in case.options or "optimizer" in case.options:
        return []
    model, _ = build(case)
    analytic = torch.zeros((), dtype=torch.float64)
    for (name, _), along in zip(trained(model), direction(case, model), strict=True):
        gradient = got.gradients[0][name]
        if gradient is not None:
            analytic = analytic + (gradient.conj() * along).sum().real
    estimates = []
    for step in (STEP, STEP / 8):
        numeric = (loss_at(case, step) - loss_at(case, -step)) / (2 * step)
        estimates.append(float(numeric))
        scale = max(1.0, abs(float(analytic)))
        if abs(float(numeric) - float(analytic)) <= OF_DERIVATIVES * scale * (STEP / step):
            return []
    return [f"derivative: by finite differences {estimates}, by gradients {float(analytic)}"]
