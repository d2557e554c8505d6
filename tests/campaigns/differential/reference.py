"""The unsplit model, run micro-batch by micro-batch; what a pipeline must equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.differential.cases import Case, batch, build, loss_fn, sizes, tensors
from tests.campaigns.differential.hooks import PARAMETER_HOOKS, HookCalls
from tests.campaigns.models.items import Layer

LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass
class Observed:
    """What is compared: by step, or at the end."""

    losses: list[Tensor | None] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    """By step: of the parameters, and of the input as ``input``."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    """How often each hook was called, without recomputations."""
    repeated: dict[str, int] = field(default_factory=dict)
    """How often each hook was called by recomputations."""

    def saw_gradients(self, model: nn.Module, x: Tensor) -> None:
        """After a step."""
        seen = {name: _copy(p.grad) for name, p in model.named_parameters()}
        self.gradients.append({**seen, "input": _copy(x.grad)})

    def saw_state(self, model: nn.Module, calls: HookCalls) -> None:
        """At the end."""
        self.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.calls, self.repeated = calls.counted(recomputing=False), calls.counted(recomputing=True)


def _copy(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense().clone() if gradient.is_sparse else gradient.detach().clone()


def around(case: Case) -> Any:
    """The context of a step."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in case.options else nullcontext()


def updates(case: Case, step: int) -> bool:
    """Whether the optimizer inside the step runs in this one."""
    later = [kind for kind in case.steps[step + 1 :] if kind == "train"]
    return "accumulate" not in case.options or not later


def install(layers: list[Layer], calls: HookCalls, *, parameters: bool) -> list[Any]:
    """Install the hooks of all layers: those on modules, or those on parameters, whose handles are returned."""
    handles = []
    for number, layer in enumerate(layers):
        for hook in layer.hooks:
            name = f"{number} ({layer.name})"
            if parameters and hook in PARAMETER_HOOKS:
                handles += calls.on_parameters(name, layer.module, hook)
            elif not parameters and hook not in PARAMETER_HOOKS:
                calls.on_module(name, layer.module, hook)
    return handles


def run_unsplit(case: Case) -> Observed:
    """What the unsplit model does. Parameter hooks see the whole gradient of a step once."""
    model, layers = build(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, LEARNING_RATE, MOMENTUM) if "optimizer" in case.options else None
    calls, observed, loss = HookCalls(), Observed(), loss_fn(case)
    install(layers, calls, parameters=False)
    for step, kind in enumerate(case.steps):
        x, target = batch(case, step)
        x.requires_grad_("input gradient" in case.options)
        model.train(kind == "train")
        before = [p.grad for p in trained]
        if kind != "eval" and "accumulate" not in case.options:
            before = [None] * len(trained)
        for p in trained:
            p.grad = None
        outputs, losses, counts = [], [], []
        with _deferred(model, case, kind == "train"):
            for rows, wanted in zip(x.split(sizes(case)), target.split(sizes(case)), strict=True):
                with around(case), nullcontext() if kind != "eval" else torch.no_grad():
                    output = model(rows.clone())  # A layer may write into it.
                    returned = loss(output, wanted)
                mean, count = returned if case.loss == "counted" else (returned, _weight(case, rows))
                if kind != "eval":
                    torch.autograd.backward(mean * count)
                outputs.append([tensor.detach() for tensor in tensors(output)])
                losses.append(mean.detach())
                counts.append(torch.as_tensor(count, dtype=mean.dtype))
        total = torch.stack(counts).sum() if case.loss == "counted" else 1.0
        observed.outputs.append([torch.cat(column) for column in zip(*outputs, strict=True)])
        observed.losses.append(sum(a * b for a, b in zip(losses, counts, strict=True)) / total)
        whole = [None if p.grad is None else p.grad / total for p in trained]
        for p, gradient in zip(trained, before, strict=True):
            p.grad = gradient
        if kind == "eval":
            continue
        handles = install(layers, calls, parameters=True)
        there = [(p, gradient) for p, gradient in zip(trained, whole, strict=True) if gradient is not None]
        if there:
            torch.autograd.backward([p for p, _ in there], [gradient for _, gradient in there])
        for handle in handles:
            handle.remove()
        if x.grad is not None:
            x.grad /= total
        if kind == "train" and optimizer is not None and updates(case, step):
            optimizer.step()
            optimizer.zero_grad()
        observed.saw_gradients(model, x)
    observed.saw_state(model, calls)
    return observed


def _weight(case: Case, rows: Tensor) -> float:
    return 1.0 if case.loss == "sum" else len(rows) / case.samples


@contextmanager
def _deferred(model: nn.Module, case: Case, training: bool) -> Iterator[None]:
    """Inside, batch norms normalise each micro-batch and gather; their statistics are then updated once."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not training or "deferred batch norm" not in case.options or not norms:
        yield
        return
    gathered: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    handles = [n.register_forward_pre_hook(lambda m, args: gathered[m].append(args[0].detach())) for n in norms]
    kept = {norm: {name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms}
    yield
    for handle in handles:
        handle.remove()
    for norm in norms:
        for name, buffer in norm.named_buffers():
            buffer.copy_(kept[norm][name])
        with torch.no_grad():
            norm.forward(torch.cat(gathered[norm]))  # The hooks of the case have run.
