"""Checks of compiled stages and of stages whose kernels are captured in CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from asyncpipe import TaskKind
from asyncpipe.bench.harness import seconds_of
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import (
    GptShape,
    batch,
    by_parts,
    distance,
    gpt_batch,
    gpt_layers,
    gpt_loss,
    layers,
    mean_square,
    piped,
    take_gradients,
    tanh_layers,
)
from benchmarks.gpu.outcome import Figure, Outcome, at_least, at_most, check, seen
from benchmarks.gpu.tasks import host_seconds

__all__: list[str] = []


@check("Is a compiled stage one graph inside a pipeline, as it is outside?", 13, limit=150)
def compiled_stages(machine: Machine) -> Outcome:
    """Stages that the caller has compiled: graphs and breaks by a backend that counts; on a GPU ms of a step."""
    from torch._dynamo import reset, utils

    graphs = []

    def counting(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def seconds(piping: bool, width: int, depth: int, samples: int, **options: Any) -> float:
        """Of a step; stages are compiled if there are options."""
        reset()
        utils.counters.clear()
        block = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
        x = torch.randn(samples, width, device=machine.device)
        stages = [nn.Sequential(*copy.deepcopy(block * depth)).to(machine.device) for _ in range(2)]
        parts: list[Any] = [torch.compile(each, **options) if options else each for each in stages]
        model = nn.Sequential(*parts)
        with piped(model, machine.two) if piping else nullcontext() as pipe:
            return machine.median_seconds(lambda: pipe.step(x).wait() if pipe else by_parts(model, x))

    broken, figures = {}, []
    for way in ("plain loop", "pipeline"):
        graphs.clear()
        seconds(way == "pipeline", 16, 1, 8, backend=counting)
        broken[way] = sum(utils.counters["graph_break"].values())
        figures.append(seen(f"{way}: graphs", len(graphs)))
        if machine.cuda:
            eager, compiled = (seconds(way == "pipeline", 1024, 4, 4096, **each) for each in ({}, {"dynamic": False}))
            figures += [seen(f"{way}: eager", eager * 1e3, "ms"), seen(f"{way}: compiled", compiled * 1e3, "ms")]
    return Outcome(
        [at_most("breaks in the pipeline", broken["pipeline"], broken["plain loop"], promised=True), *figures]
    )


class _Fresh(torch.autograd.Function):
    """A copy, also of the gradient: a replay writes to the same memory each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class GraphedByCaller(nn.Module):
    """A stage that is captured by torch when it is first called, and shares no memory with its neighbours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.is_captured = inner, False
        for parameter in inner.parameters():
            parameter.register_hook(torch.clone)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_captured:
            with torch.enable_grad():
                sample = x.detach().clone().requires_grad_(x.requires_grad)
                torch.cuda.make_graphed_callables(self.inner, (sample,))
            self.is_captured = True
        passed: Tensor = _Fresh.apply(x)  # type: ignore[no-untyped-call]
        returned: Tensor = _Fresh.apply(self.inner(passed))  # type: ignore[no-untyped-call]
        return returned


NO_GRAPHS = "only CUDA has graphs"


@check("Can a stage be a CUDA graph that the caller captures, before or in a task?", 8, limit=90, needs_gpu=NO_GRAPHS)
def callers_graphs(machine: Machine) -> Outcome:
    """By ``torch.cuda.make_graphed_callables``; gradients against those of a plain model."""
    x, figures = batch(64, 64).to(machine.device), []
    plain = nn.Sequential(*(layers(64, 12) for _ in range(2))).to(machine.device)
    torch.autograd.backward(mean_square(plain(x)))
    wanted = [parameter.grad for parameter in plain.parameters()]
    for way in ("eager", "captured before", "captured in a task"):
        made = [layers(64, 12).to(machine.device) for _ in range(2)]
        stages = made if way == "eager" else [GraphedByCaller(each) for each in made]
        if way == "captured before":
            for number, each in enumerate(stages):
                each(x[:8].clone().requires_grad_(number > 0))
        model = nn.Sequential(*stages)
        with piped(model, machine.two, microbatches=8, checkpoint="always", balance=[1, 1]) as pipe:
            seconds = machine.median_seconds(lambda: pipe.step(x, return_outputs=False))
            model.zero_grad()
            pipe.step(x).wait()
        worst = distance(take_gradients(model), wanted)
        figures.append(at_most(f"{way}: off by", worst, 1e-10, promised=True))
        figures.append(seen(f"{way}: a step", seconds * 1e3, "ms"))
    return Outcome(figures)


@check(
    'Is compile="cudagraphs" right with dropout on two logical devices, and what does it save the host?',
    8,
    limit=90,
    needs_gpu=NO_GRAPHS,
)
def stage_graphs(machine: Machine) -> Outcome:
    """Stages of 24 short layers. Draws differ from those of eager stages, but must be the same when recomputed."""
    figures: list[Figure] = []
    x = torch.randn(64, 256, device=machine.device)
    steps, host = {}, {}
    for name, option in (("eager", False), ("graphs", "cudagraphs")):
        torch.manual_seed(0)
        model = nn.Sequential(*(tanh_layers(256, 24) for _ in range(2)))
        with piped(model, machine.two, microbatches=8, balance=[1, 1], compile=option) as pipe:
            figures.append(seen(f"{name}: first step", seconds_of(lambda: pipe.step(x).wait()), "s"))
            steps[name] = machine.median_seconds(lambda: pipe.step(x, return_outputs=False))
            record = pipe.step(x).wait().record
        spent = host_seconds(record)
        forwards = sorted(spent[each.number] for each in record.graph.tasks if each.kind is TaskKind.FORWARD)
        host[name] = forwards[len(forwards) // 2]
    drawn = {}
    for mode in ("never", "always"):
        torch.manual_seed(0)
        model = nn.Sequential(*(tanh_layers(256, 4, dropout=0.5) for _ in range(2))).double()
        options = {"balance": [1, 1], "checkpoint": mode, "compile": "cudagraphs"}
        with piped(model, machine.two, microbatches=8, **options) as pipe:
            for _ in range(3):
                model.zero_grad()
                torch.manual_seed(3)
                pipe.step(x.double()).wait()
        drawn[mode] = take_gradients(model)
    return Outcome(
        [
            at_most(
                "recomputed draws: gradients off by", distance(drawn["always"], drawn["never"]), 1e-10, promised=True
            ),
            *figures,
            at_least("eager step over a step of graphs", steps["eager"] / steps["graphs"], 2.0, "×"),
            at_most("a forward of 48 kernels on the host", host["graphs"] * 1e6, 80, "µs"),
            seen("the same, eager", host["eager"] * 1e6, "µs"),
        ]
    )


@check(
    "How long does compiling GPT-2 small's shape take, and a new length of its texts?",
    13,
    limit=150,
    needs_gpu="on a CPU inductor takes a minute: python -m benchmarks compiled",
)
def compile_seconds(machine: Machine) -> Outcome:
    """12 layers on two logical devices in bf16, compiled by inductor with nothing in its cache."""
    shape = GptShape()
    made = gpt_layers(shape, machine.device, torch.bfloat16)
    options: dict[str, Any] = {"microbatches": 2, "balance": [7, 7], "loss_fn": gpt_loss, "compile": True}
    found = {}
    with fresh_cache(), piped(made, machine.two, **options) as pipe:
        for name, tokens in (("first step", 512), ("second step", 512), ("first step of another length", 384)):
            pair = gpt_batch(shape, 4, machine.device, tokens)
            found[name] = seconds_of(lambda: pipe.step(*pair, return_outputs=False).wait())  # noqa: B023
        stages = "; ".join(map(str, pipe.compiled))
    return Outcome(
        [
            at_most("first step", found["first step"], 25, "s"),
            seen("second step", found["second step"], "s"),
            at_most("first step of another length", found["first step of another length"], 10, "s"),
        ],
        stages,
    )


def fresh_cache() -> Any:
    """Inductor finds nothing of earlier runs."""
    from torch._inductor.utils import fresh_inductor_cache

    return fresh_inductor_cache()
