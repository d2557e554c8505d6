"""Draws on an accelerator: by seed, micro-batch and stage, from its default generator, which is given back."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from asyncpipe import Pipeline
from asyncpipe.ops.autograd.random_streams import RandomStream, draw_step_seed
from tests.emulated.helpers import X, layers, squares, take_gradients, worst

SEED = 5
generator = torch.emu.default_generators[0]


def dropout(x):
    return F.dropout(x, 0.5, True)


def gradients(*inside, devices=("emu:0",) * 2, autocast=False, **options):
    model = layers(*inside)
    options = {"microbatches": 4, "checkpoint": "never", "loss_fn": squares, "balance": [3, 2], **options}
    options["generator"] = torch.Generator().manual_seed(SEED)
    with Pipeline(model, list(devices), **options).sync() as pipe, torch.autocast("cpu", enabled=autocast):
        record = pipe.step(X).wait().record
    return [gradient.cpu() for gradient in take_gradients(model)], record


@pytest.mark.promise(
    "Bit-identical results",
    "Random numbers on an accelerator are equal in every recomputation mode, schedule and placement.",
)
@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "except_last"), ("zb-h1", "never"), ("zb-h1", "always")])
def test_draws_are_equal_in_every_mode_schedule_and_placement(schedule, checkpoint):
    generator.manual_seed(77).set_offset(8)
    wanted, record = gradients(dropout)
    assert record.notes.drew == {0}
    for devices, autocast in product([["emu:0"] * 2, ["emu:0", "cpu"]], [False, True]):
        found, _ = gradients(dropout, devices=devices, autocast=autocast, schedule=schedule, checkpoint=checkpoint)
        assert worst(found, wanted) < 1e-10
    assert (generator.seed, generator.offset) == (77, 8), "the caller's draws go on from where they were"


@pytest.mark.promise(
    "Bit-identical results",
    "Random numbers on an accelerator are equal in every recomputation mode, schedule and placement.",
)
def test_a_task_finds_the_generator_at_the_start_of_its_stream():
    places = []

    def look(x):
        places.append((generator.initial_seed(), generator.get_offset()))
        return x * 1

    _, record = gradients(look)
    seed = draw_step_seed(torch.Generator().manual_seed(SEED))
    assert places == [(RandomStream(seed, i, 0).seed, 0) for i in range(4)]
    assert record.notes.drew == set()


def test_a_task_draws_on_the_cpu_from_its_stream_as_well():
    def noise(x):
        return x * torch.rand(8, dtype=torch.float64).to("emu:0")

    torch.manual_seed(3)
    wanted, record = gradients(noise)
    torch.manual_seed(4)
    assert record.notes.drew == {0}
    assert worst(gradients(noise, checkpoint="always")[0], wanted) < 1e-10
