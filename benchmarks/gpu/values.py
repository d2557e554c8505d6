"""Checks of values: losses, gradients and draws are those of the same model without a pipeline."""

from __future__ import annotations

import copy
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncpipe import SyncPipeline
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import (
    FunctionLayer,
    batch,
    busy_stages,
    distance,
    layers,
    mean_square,
    mse,
    note,
    off,
    piped,
    stage,
    take_gradients,
)
from benchmarks.gpu.outcome import Figure, Outcome, at_most, check, seen

__all__: list[str] = []

EXACT = 1e-10
"""What another order of sums may make of float64."""


def tried(work: Callable[..., float], *arguments: Any) -> float:
    """What ``work`` returns; infinite, with the error in the output, if it raises."""
    try:
        return work(*arguments)
    except Exception:  # noqa: BLE001 - the other cases go on
        traceback.print_exc()
        return math.inf


@check("Are loss and gradients those of the unsplit model, however the GPU is used?", limit=120)
def gradients(machine: Machine) -> Outcome:
    """Each schedule and recomputation, on one and on two logical devices and beside a CPU; ``step`` and ``pipe(x)``."""
    modes = "always", "except_last", "never"
    schedules: Sequence[str] = ("gpipe", "1f1b", "zb-h1", "backward-first")
    places = [machine.one, machine.two, machine.mixed, machine.mixed[::-1]]
    if not machine.cuda:
        schedules, places = ("1f1b", "zb-h1"), [machine.one, machine.two]
    x, target, found = batch(10), batch(10).flip(0), {}

    def worst(devices: list[str], schedule: str, mode: str) -> float:
        model = layers()
        with piped(model, devices, schedule=schedule, checkpoint=mode, loss_fn=mse) as pipe:
            by_step = off(x, target, [pipe.step(x, target).loss, *take_gradients(model)])
            loss = mse(pipe(x).cpu(), target)
            torch.autograd.backward(loss)
            return max(by_step, off(x, target, [loss, *take_gradients(model)]))

    for devices, *how in product(places, schedules, modes):
        found[" ".join(["+".join(devices), *how])] = tried(worst, devices, *how)
    wrong = [name for name, value in found.items() if value > EXACT]
    return Outcome(
        [
            at_most("wrong pipelines", len(wrong), 0, f"of {len(found)}", promised=True),
            at_most("the worst is off by", max(found.values()), EXACT, promised=True),
        ],
        ", ".join(wrong),
    )


@check("Does a CPU stage wait for the caller's tensors that come from the GPU?")
def cpu_stage_inputs(machine: Machine) -> Outcome:
    """Inputs that the caller's stream writes in 0.1 s, or has written, and pinned memory that is NaN before."""
    x, target = batch(16), batch(16).flip(0)

    def worst(devices: list[str], seconds: float) -> float:
        model = layers()
        with piped(model, devices, loss_fn=mse) as pipe:
            machine.poison_pinned(x.nbytes // 4)
            loss = pipe.step(*machine.late(seconds, x, target)).wait().loss
        return off(x, target, [loss, *take_gradients(model)])

    figures = [
        at_most(f"{'+'.join(devices)}, {name}: off by", tried(worst, devices, seconds), EXACT, promised=True)
        for devices in (["cpu:0"], machine.mixed, machine.mixed[::-1])
        for name, seconds in (("late", 0.1), ("ready", 0.0))
    ]
    return Outcome(figures)


@check("Are a CPU stage's gradients divided by what a loss on the GPU has counted once that is there?")
def cpu_normalizer(machine: Machine) -> Outcome:
    """The caller's stream has other work meanwhile, another job's for instance."""
    x, target, trials = batch(10), batch(10).flip(0), 10 if machine.cuda else 2
    wrong = {"after the step": 0, "by an optimizer in the step": 0}

    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        with machine.on(machine.default_stream()):
            machine.busy(0.02)
        return mse(output, target), target.shape[0]

    for way, _ in product(wrong, range(trials)):
        model = layers()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        inside = way != "after the step"
        optimizer = {"optimizer": partial(torch.optim.SGD, lr=1.0)} if inside else {}
        with piped(model, machine.mixed, loss_fn=counted, **optimizer) as pipe:
            machine.poison_pinned(8)
            loss = pipe.step(x, target).wait().loss
        change = [old - new.detach().cpu() for old, new in zip(before, model.parameters(), strict=True)]
        found: list[Tensor | None] = [*change] if inside else take_gradients(model)
        wrong[way] += off(x, target, [loss, *found]) > EXACT
    return Outcome([at_most(f"wrong {way}", count, 0, f"of {trials}", promised=True) for way, count in wrong.items()])


@check("Do a stage's draws stay its own while another stage uses torch.utils.checkpoint?", limit=90)
def draws_beside_checkpoint(machine: Machine) -> Outcome:
    """The generator's state is saved and set by torch on one thread, while another one draws."""
    sys.setswitchinterval(1e-5)

    def checkpointed(x: Tensor, preserve: bool) -> Tensor:
        for _ in range(20):
            x = checkpoint(torch.tanh, x, use_reentrant=False, preserve_rng_state=preserve)
        return x

    def draw(x: Tensor) -> Tensor:
        ones = torch.ones(1 << 14, dtype=torch.float64, device=x.device)
        draws = [functional.dropout(ones) if machine.cuda else torch.rand_like(ones) for _ in range(20)]
        return torch.stack(draws).sum(1)[None] + 0 * x.sum()

    def drawn(preserve: bool) -> tuple[list[Tensor], list[Tensor]]:
        first: list[Tensor] = []
        again: list[Tensor] = []
        stages = stage(partial(checkpointed, preserve=preserve)), nn.Sequential(FunctionLayer(draw), note(first, again))
        options = {"microbatches": 8, "checkpoint": "always", "balance": [1, 1]}
        with piped(nn.Sequential(*stages), machine.two, **options) as pipe:
            for seed in range(20 if machine.cuda else 2):
                torch.manual_seed(seed)
                pipe.step(batch(8).to(machine.device)).wait()
        return first, again

    (wanted, control), (first, again) = drawn(preserve=False), drawn(preserve=True)
    pairs = {
        "others than with preserve_rng_state=False": (first, wanted),
        "others when recomputed": (first, again),
        "others when recomputed with preserve_rng_state=False": (wanted, control),
    }
    return Outcome(
        [
            at_most(
                name,
                sum(distance([a], [b]) > 1e-6 for a, b in zip(*pair, strict=True)),
                0,
                f"of {len(wanted)} forwards",
                promised=True,
            )
            for name, pair in pairs.items()
        ]
    )


@check("Does a recomputation draw again what its forward drew?")
def replayed_draws(machine: Machine) -> Outcome:
    """Layers that draw by cuDNN, by fused attention and by torch's own kernels."""

    def attention(x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], 4, 8).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)

    recurrent = partial(nn.LSTM, 32, 32, 2, batch_first=True)
    kinds: dict[str, nn.Module] = {"LSTM without dropout": recurrent(), "LSTM": recurrent(dropout=0.5)}
    kinds |= {"attention": FunctionLayer(attention), "GRU": nn.GRU(32, 32, 2, batch_first=True, dropout=0.5)}
    kinds |= {"Dropout": nn.Dropout(0.5), "RReLU": nn.RReLU()}

    def worst(layer: nn.Module) -> float:
        first: list[Tensor] = []
        again: list[Tensor] = []
        model = nn.Sequential(nn.Linear(32, 32), layer, note(first, again))
        with piped(model, machine.one, checkpoint="always") as pipe:
            for _ in range(2):
                pipe.step(torch.randn(8, 6, 32, device=machine.device)).wait()
        return distance(again, first)

    return Outcome(
        [at_most(f"{name}: off by", tried(worst, layer), 1e-2, promised=True) for name, layer in kinds.items()]
    )


@check("May a stream read gradients as soon as a backward on it returns, wherever the forward was?")
def dropin_streams(machine: Machine) -> Outcome:
    """Forwards and backwards of ``pipe(x)`` on each pair of three streams; gradients are read on the backward's."""
    streams = {"default": machine.default_stream(), "first": machine.new_stream(), "second": machine.new_stream()}

    def read(
        call: nn.Module | SyncPipeline, model: nn.Module, x: Tensor, forward: str, backward: str
    ) -> list[Tensor | None]:
        x = x.clone().requires_grad_()
        machine.synchronize()
        with machine.on(streams[forward]):
            loss = mean_square(call(x))
        streams[backward].wait_stream(streams[forward])
        with machine.on(streams[backward]):
            torch.autograd.backward(loss)
            taken = [None if each is None else each.clone() for each in (x.grad, *take_gradients(model))]
        machine.synchronize()
        return taken

    model = busy_stages(machine, 0.01).to(machine.device)
    plain, found, control = copy.deepcopy(model), {}, []
    with piped(model, machine.two) as pipe:
        for turn, (forward, backward) in enumerate(product(streams, repeat=2), 1):
            x = turn * batch(8).to(machine.device)  # Others each time: what memory had before must not look right.
            wanted = read(plain, plain, x, "default", "default")
            control.append(distance(read(plain, plain, x, forward, backward), wanted))
            found[f"{forward}-{backward}"] = distance(read(pipe, model, x, forward, backward), wanted)
    figures: list[Figure] = [at_most(f"{name}: off by", value, EXACT, promised=True) for name, value in found.items()]
    return Outcome([*figures, seen("the bare model: off by", max(control))])


@check("Do pipe(x), its backward and steps beside it run without a warning?")
def dropin_warnings(machine: Machine) -> Outcome:
    """Warnings are errors, and torch's warnings come each time."""
    warnings.simplefilter("error")
    torch.set_warn_always(True)
    x, plain, model = batch(8).to(machine.device), layers().to(machine.device), layers()
    alive: list[Tensor] = []
    raised = {}
    pipe = piped(model, machine.two).__enter__()

    def step_beside_a_loss() -> None:
        alive.append(mean_square(pipe(x)))
        pipe.step(x).wait()

    works: dict[str, Callable[[], Any]] = {
        "bare model": lambda: torch.autograd.backward(mean_square(plain(x))),
        "step": lambda: pipe.step(x).wait(),
        "pipe(x)": lambda: torch.autograd.backward(mean_square(pipe(x))),
        "step while a loss of pipe(x) lives": step_beside_a_loss,
    }
    for name, work in works.items():
        try:
            work()
            work()
        except BaseException as error:  # noqa: BLE001 - it is told
            raised[name] = f"{name}: {type(error).__name__}: {str(error.__cause__ or error)[:200]}"
    return Outcome([at_most("warnings", len(raised), 0, promised=True)], "; ".join(raised.values()))
