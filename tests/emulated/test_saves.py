"""Saves have what the steps before have made, and steps see what was loaded: on the streams of the caller."""

from functools import partial

import pytest
import torch

from asyncpipe import Pipeline
from tests.emulated import device as emu
from tests.emulated.helpers import TARGET, X, layers, squares


async def losses(device, folder, layout):
    adam = partial(torch.optim.AdamW, lr=0.05)
    options = {"microbatches": 4, "loss_fn": squares, "optimizer": adam, "balance": [2, 2]}
    async with Pipeline(layers(), [device] * 2, **options) as pipe:
        x, target = X.to(device), TARGET.to(device)
        found = [(await pipe.step(x, target)).loss]
        await pipe.save(folder, format=layout)
        found.append((await pipe.step(x, target)).loss)
        await pipe.load(folder)
        found.append((await pipe.step(x, target)).loss)
        return [loss.cpu() for loss in found]


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
async def test_a_save_copies_and_a_load_writes_in_order_with_steps(layout, tmp_path):
    with emu.stream(emu.Stream()):
        first, second, again = await losses("emu:0", tmp_path / "save", layout)
    emu.synchronize()
    assert torch.equal(second, again)
    torch.testing.assert_close(
        [first, second], (await losses("cpu:0", tmp_path / "cpu", layout))[:2], rtol=0, atol=1e-10
    )
