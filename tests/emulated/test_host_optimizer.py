"""Optimizers on the host: the numbers of an optimizer over parameters on the CPU, and no states on the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from asyncpipe import Batch
from asyncpipe.ops.execute.learning_rates import set_learning_rate
from tests.emulated import device as emu
from tests.emulated.helpers import TARGET, X, layers, piped

RATES = [0.05, 0.03, 0.02, 0.01]
ADAM = partial(torch.optim.AdamW, lr=0.05, foreach=False)


def trained(devices, steps=4, at_once=False, **options):
    """The model after some steps, and what its optimizers remember."""
    model = layers()
    with piped(model, devices, optimizer=ADAM, gradient_norms=True, **options) as pipe:
        if at_once:
            results = [result.wait() for result in pipe.steps([Batch(X, TARGET, rate) for rate in RATES[:steps]])]
        else:
            results = [pipe.step(X, TARGET, learning_rate=rate).wait() for rate in RATES[:steps]]
        assert len(results[-1].gradient_norms) == len(devices)
        return model, {name: dict(state) for name, state in pipe.optimizer_states().items()}


def by_hand():
    """The parameters, and what is remembered, of an optimizer over parameters on the CPU, by the device's gradients."""
    model = layers()
    with piped(model, ["emu:0"] * 2) as pipe:
        mine = [nn.Parameter(parameter.detach().cpu()) for parameter in model.parameters()]
        optimizer = ADAM(mine)
        for rate in RATES:
            pipe.step(X, TARGET).wait()
            set_learning_rate(optimizer, rate)
            for parameter, theirs in zip(mine, model.parameters(), strict=True):
                parameter.grad, theirs.grad = theirs.grad.cpu(), None
            optimizer.step()
            with torch.no_grad():
                for parameter, theirs in zip(mine, model.parameters(), strict=True):
                    theirs.copy_(parameter)
    return mine, [optimizer.state[parameter] for parameter in mine]


@pytest.mark.promise(
    "Bit-identical results",
    "With `optimizer_on_host`, numbers are those of the optimizer on the CPU, and the device holds no states.",
)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_numbers_are_those_of_the_optimizer_on_the_cpu(at_once):
    wanted, remembered = by_hand()
    model, states = trained(["emu:0"] * 2, at_once=at_once, optimizer_on_host=True)
    for mine, theirs in zip(model.parameters(), wanted, strict=True):
        assert mine.device.type == "emu"
        assert mine.detach().cpu().equal(theirs.detach()), "not the same bits"
        assert mine.grad is None
    assert list(states) == [name for name, _ in model.named_parameters()]
    for mine, theirs in zip(states.values(), remembered, strict=True):
        assert all(value.is_cpu and value.equal(theirs[key]) for key, value in mine.items())


@pytest.mark.promise(
    "Bit-identical results",
    "With `optimizer_on_host`, numbers are those of the optimizer on the CPU, and the device holds no states.",
)
def test_states_are_loaded_to_the_host_and_changed_weights_count():
    """A snapshot: weights and states of one pipeline go on in another."""
    wanted, _ = trained(["emu:0"] * 2, steps=4, optimizer_on_host=True)
    first, states = trained(["emu:0"] * 2, steps=2, optimizer_on_host=True)
    second = layers()
    with piped(second, ["emu:0"], optimizer=ADAM, optimizer_on_host=True) as pipe:
        pipe.step(X, TARGET).wait()
        with torch.no_grad():
            # Without a trace in their versions: who has changed them does not matter.
            for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
                mine.data.copy_(theirs.data)
        pipe.load_optimizer_states(states)
        for rate in RATES[2:]:
            pipe.step(X, TARGET, learning_rate=rate).wait()
        assert all(value.is_cpu for state in pipe.optimizer_states().values() for value in state.values())
    for mine, theirs in zip(second.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(mine.detach().cpu(), theirs.detach().cpu(), rtol=0, atol=1e-12)


@pytest.mark.promise(
    "Bit-identical results",
    "With `optimizer_on_host`, numbers are those of the optimizer on the CPU, and the device holds no states.",
)
def test_the_device_has_no_states():
    emu.forget_peak()
    held = {}
    for on_host in (False, True):
        before = sum(emu.allocated.values())
        model, states = trained(["emu:0"], steps=1, optimizer_on_host=on_host)
        held[on_host] = sum(emu.allocated.values()) - before
        size = sum(parameter.numel() * 8 for parameter in model.parameters())
        del model, states
    assert held[False] >= 3 * size
    assert held[True] < 1.5 * size
