"""Models of examples and benchmarks, tiny and in float64: gradients of the unsplit model, however they are trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import Pipeline
from asyncpipe.core.kinds import TaskKind
from benchmarks.examples import load_example
from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.unet import unet

MODES = ("always", "except_last", "never")
mse = nn.functional.mse_loss


def charlm() -> tuple[nn.Sequential, Tensor]:
    workload = load_example("charlm").build(width=16, heads=2, blocks=2, context=8, max_bytes=50_000, dropout=0.0)
    return workload.model, next(workload.batches(7, torch.Generator().manual_seed(0)))[0]


def small_unet(**options: Any) -> tuple[nn.Sequential, Tensor]:
    return unet(depth=3, num_convs=1, base_channels=4, **options), torch.randn(7, 3, 16, 16)


def small_amoebanet() -> tuple[nn.Sequential, Tensor]:
    # In evaluation of its norms: in training mode they normalise each micro-batch, which a whole batch does not.
    return amoebanetd(num_layers=3, num_filters=8), torch.randn(7, 3, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
    "charlm": charlm,
    "unet": lambda: small_unet(norm=False),
    "unet without portals": lambda: small_unet(norm=False, portals=False),
    "unet with norms": small_unet,
    "amoebanet": small_amoebanet,
}


def make(name: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
    return model.double(), x.double() if x.is_floating_point() else x


def balance(layers: int, stages: int) -> list[int]:
    return [layers // stages + (k < layers % stages) for k in range(stages)]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_unsplit_model(name: str, stages: int) -> None:
    bare, x = make(name)
    expected = bare(x)
    target = torch.randn_like(expected)
    mse(expected, target).backward()
    for mode, schedule in itertools.product(MODES, ("gpipe", "1f1b")):
        model, _ = make(name)
        devices = [f"cpu:{k}" for k in range(stages)]
        with Pipeline(
            model,
            devices,
            microbatches=3,
            balance=balance(len(model), stages),
            schedule=schedule,
            checkpoint=mode,
            loss_fn=mse,
        ).sync() as pipe:
            outputs = pipe.step(x, target).outputs
            assert (outputs - expected).abs().max() < 1e-10, (mode, schedule)
            check(model, bare)
            if schedule == "gpipe":  # Of a call, all forwards come first in any schedule.
                output = pipe(x)
                mse(output, target).backward()
                assert (output - expected).abs().max() < 1e-10, mode
                check(model, bare)


def check(model: nn.Module, bare: nn.Module) -> None:
    """The gradients are equal; drops the model's own."""
    for (key, ours), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        assert theirs.grad is None or (ours.grad - theirs.grad).abs().max() < 1e-10, key
        ours.grad = None


# Copies of a U-Net over four devices


def copies(model: nn.Sequential, x: Tensor, sizes: list[int]) -> tuple[dict[tuple[int, int], int], int]:
    """How often each pair of stages copies, and the bytes of all copies, in one training step."""
    devices = [f"cpu:{k}" for k in range(4)]
    with Pipeline(
        model, devices, microbatches=2, balance=sizes, checkpoint="never", loss_fn=lambda y: y.square().mean()
    ).sync() as pipe:
        record = pipe.step(x).wait().record
    graph, moved = record.graph, sum(record.notes.copied.values())
    found: dict[tuple[int, int], int] = {}
    for task in graph.tasks:
        if task.kind is TaskKind.COPY:
            assert task.source is not None
            found[task.source, task.stage] = found.get((task.source, task.stage), 0) + 1
    return found, moved


def test_each_skip_is_copied_once_in_each_direction_to_its_user_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Depth 3 over four stages: two encoder stages stash, and two decoder stages pop, so skips jump stages."""
    model, x = make("unet")
    without, _ = make("unet without portals")
    kinds = [type(layer).__name__ for layer in model]
    keeps, joins = ([k for k, kind in enumerate(kinds) if kind == name] for name in ("Keep", "Join"))
    # Stage 0 stashes the two outer skips, stage 1 the inner one; stage 2 pops the inner one, stage 3 the outer two.
    ends = [keeps[1] + 1, keeps[2] + 2, joins[0] + 1, len(model)]
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    found, moved = copies(model, x, sizes)
    borders = {(0, 1), (1, 2), (2, 3)}
    skips = {(0, 3)}
    both_ways = {pair for ends in borders | skips for pair in (ends, ends[::-1])}
    assert found == dict.fromkeys(both_ways, 2), "one copy a micro-batch, link and direction"
    found_without, moved_without = copies(without, x, sizes)
    assert set(found_without) == {pair for ends in borders for pair in (ends, ends[::-1])}
    # Forward and backward: each skip's bytes once, against once a border that it crosses (the outer ones cross three).
    outer = sum(2 * 7 * 4 * 2**level * (16 // 2**level) ** 2 * 8 for level in (0, 1))
    assert moved_without - moved == 2 * outer
    with capsys.disabled():
        print(f"\nU-Net over 4 devices: {moved:,} bytes copied, {moved_without:,} without portals")
