"""Wrong input raises a typed error, which says what is wrong and what is allowed, before anything runs."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, TaskError
from asyncpipe import errors as e
from asyncpipe.compat.torchgpipe import GPipe

mse = nn.functional.mse_loss


def layers(count=4):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


CONSTRUCTOR = [
    ({"balance": [1, 2]}, e.BalanceError, "sums up to 3, but the model has 4 layers"),
    ({"balance": [4, 0]}, e.BalanceError, "positive integers"),
    ({"balance": [1, 1, 2]}, e.ScheduleError, r"balance \[1, 1, 2\] has 3 entries for 2 dev.* with 2 entries"),
    ({"balance": [4]}, e.ScheduleError, r"balance \[4\] has 1 entries for 2 devices: .* or use 'interleaved'$"),
    ({"balance": "even"}, e.BalanceError, "'auto' or a list"),
    ({"stages": 5}, e.ScheduleError, "^schedule.* or give a balance with 2 entries, which joins stages"),
    ({"stages": 6, "schedule": "interleaved"}, e.BalanceError, "4 layers into 6 stages"),
    ({"stages": 3, "schedule": "interleaved"}, e.ScheduleError, "a multiple of 2, or give a balance with 2 entries"),
    ({"stages": 7, "schedule": "zbv"}, e.ScheduleError, "give 4 stages, or give a balance with 4 entries"),
    ({"microbatches": 0}, e.MicrobatchError, "positive integer, got 0"),
    ({"microbatches": -3}, e.MicrobatchError, "positive integer, got -3"),
    ({"microbatches": 2.0}, e.MicrobatchError, "positive integer, got 2.0"),
    ({"microbatches": True}, e.MicrobatchError, "positive integer, got True"),
    ({"schedule": "1f2b"}, e.UnknownScheduleError, "did you mean '1f1b'[?] known schedules: 1f1b, backward-first, "),
    ({"schedule": 3}, e.ScheduleError, "a name or a Schedule instance"),
    ({"checkpoint": "sometimes"}, e.OptionError, "'always', 'except_last', 'selective', 'never'"),
    ({"checkpoint": "allways"}, e.OptionError, "got 'allways'; did you mean 'always'[?]$"),
    ({"workers": "process"}, e.OptionError, "got 'process'; did you mean 'processes'[?]$"),
    ({"loss_reduction": "max"}, e.OptionError, "'mean', 'sum'"),
    ({"intra_op_threads": 0}, e.OptionError, "intra_op_threads must be a positive integer"),
    ({"in_flight": 0}, e.OptionError, "in_flight must be a positive integer"),
    ({"devices": []}, e.DeviceError, "must be a list such as"),
    ({"devices": "cpu"}, e.DeviceError, "must be a list such as"),
    ({"devices": ["cpu:0", "tpu:1"]}, e.DeviceError, "'tpu:1' is no device"),
    ({"devices": ["cpu:0", "meta"]}, e.DeviceError, "type 'meta'"),
    ({"devices": ["cpu:0", "cuda:77"]}, e.DeviceError, "'cuda:77' is not there"),
]


@pytest.mark.parametrize(("options", "error", "message"), CONSTRUCTOR, ids=lambda value: None)
def test_constructor(options, error, message):
    arguments = {"devices": ["cpu:0", "cpu:1"], "microbatches": 1, "loss_fn": mse} | options
    with pytest.raises(error, match=message):
        Pipeline(layers(), arguments.pop("devices"), **arguments)


def test_models_that_cannot_be_split():
    with pytest.raises(e.OptionError, match=r"nn\.Sequential, a list of modules or a traced model, got Linear"):
        Pipeline(nn.Linear(3, 3), ["cpu:0"], microbatches=1)
    with pytest.raises(e.OptionError, match="no layers"):
        Pipeline(nn.Sequential(), ["cpu:0"], microbatches=1)
    shared = nn.BatchNorm1d(3)
    with pytest.raises(e.SharedParameterError, match="stage 0 and stage 1, on different devices, both update the run"):
        Pipeline([shared, shared], ["cpu:0", "cpu:1"], microbatches=1)


x, y = torch.randn(6, 3), torch.randn(6, 3)

STEP = [
    ((x, y[:4]), e.BatchError, "the target has 4 samples, but the input has 6"),
    ((x, torch.tensor(1.0)), e.BatchError, "without dimensions"),
    ((x[:0], y[:0]), e.BatchError, "is empty"),
    (((x, x[:2]), y), e.BatchError, r"the input\[0\] has 6, the input\[1\] has 2"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), STEP, ids=lambda value: None)
async def test_step(before_task, arguments, error, message):
    ran = []
    before_task(ran.append)
    model = layers()
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, loss_fn=mse) as pipe:
        await pipe.step(x, y)
        ran.clear()
        grads = [p.grad for p in model.parameters()]
        with pytest.raises(error, match=message):
            await pipe.step(*arguments)
        assert not ran
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        await pipe.step(x, y)


async def test_a_loss_is_needed_to_train():
    async with Pipeline(layers(), ["cpu:0"], microbatches=2) as pipe:
        with pytest.raises(e.OptionError, match="give the pipeline a loss_fn"):
            await pipe.step(x, y)
        pipe.eval()
        with pytest.raises(e.OptionError, match="no loss_fn to compare"):
            await pipe.step(x, y)
        assert (await pipe.step(x)).outputs.shape == (6, 3)


class _Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.value = value

    def forward(self, x):
        return self.value


# What only a running stage or loss can show ends the step at its first micro-batch, with the gradients as before.
RUNNING = [
    ([nn.Linear(3, 3), _Returns("text")], mse, e.StageError, "stage 1 returned str without any tensor"),
    ([_Returns({"a": [1]}), nn.Linear(3, 3)], mse, e.StageError, "stage 0 returned dict without any tensor"),
    ([nn.Linear(3, 3), nn.Linear(3, 3)], lambda out, t: out - t, e.LossError, r"got shape \(3, 3\); reduce it"),
    ([nn.Linear(3, 3), nn.Linear(3, 3)], lambda out, t: 1.5, e.LossError, "without dimensions, got a float$"),
    ([nn.Linear(3, 3), nn.Linear(3, 3)], lambda out, t: out.detach().sum(), e.LossError, "does not depend on any"),
]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("model", "loss_fn", "error", "message"), RUNNING, ids=lambda value: None)
async def test_while_running(model, loss_fn, error, message, checkpoint):
    devices = ["cpu:0", "cpu:1"]
    async with Pipeline(model, devices, microbatches=2, checkpoint=checkpoint, loss_fn=loss_fn) as pipe:
        with pytest.raises(TaskError) as caught:
            await pipe.step(x, y)
    assert isinstance(caught.value.__cause__, error)
    assert re.search(message, str(caught.value))
    assert caught.value.microbatch == 0
    # A forward that is recomputed makes no graph, so only its recomputation shows that the loss has none.
    is_seen_late = checkpoint == "always" and "does not depend" in message
    assert caught.value.kind == ("R" if is_seen_late else "F")
    assert all(p.grad is None for p in nn.ModuleList(model).parameters())


class _Overwrites(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.mark.promise("Right results", "A stage may overwrite its inputs in place: it gets copies.")
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("layer", [_Overwrites, partial(nn.ReLU, inplace=True)], ids=["function", "module"])
async def test_a_stage_may_overwrite_what_it_receives(checkpoint, schedule, layer):
    """Also what another stage has saved, of the caller or of the stage before: it owns a copy."""
    model = nn.Sequential(_Overwrites(), nn.Linear(3, 3), nn.Sigmoid(), layer(), nn.Linear(3, 3))
    mse(model[4](model[3](model[2](model[1](2 * x)).clone())), y).backward()
    wanted = [p.grad for p in model.parameters()]
    options = {"balance": [3, 2], "microbatches": 3, "schedule": schedule, "checkpoint": checkpoint}
    async with Pipeline(model, ["cpu:0", "cpu:1"], loss_fn=mse, **options) as pipe:
        for _ in range(2):
            model.zero_grad()
            await pipe.step(x.clone(), y)
            torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


class _OverwritesLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.mul_(2) if self.calls > 1 else x * 2


@pytest.mark.promise(
    "Refused, not wrong", "A stage that begins to overwrite its inputs in a later forward is refused there."
)
@pytest.mark.parametrize(
    ("checkpoint", "error", "message"),
    [
        ("always", e.RecomputeError, "the input of a stage is overwritten in place"),
        ("never", e.StageError, "stage 1 overwrites in place a parameter, or what it received and did not overwrite"),
    ],
)
async def test_a_stage_that_begins_to_overwrite_what_it_receives(checkpoint, error, message):
    model = [nn.Linear(3, 3), _OverwritesLater()]
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, checkpoint=checkpoint, loss_fn=mse) as pipe:
        with pytest.raises(TaskError, match=message) as raised:
            await pipe.step(x, y)
    assert isinstance(raised.value.__cause__, error)
    assert raised.value.microbatch == 1


@pytest.mark.promise("Right results", "A write into one micro-batch disturbs no backward of another.")
async def test_in_place_on_a_microbatch_of_the_caller_spares_what_others_saved():
    """Micro-batches are views of one batch; a version shared by all would fail the backward of the first."""
    model, bare = [_Overwrites(), nn.Linear(3, 3)], nn.Linear(3, 3)
    bare.load_state_dict(model[1].state_dict())
    mse(bare(2 * x), y).backward()
    options = {"microbatches": 2, "schedule": "gpipe", "checkpoint": "never"}
    async with Pipeline(model, ["cpu:0"], loss_fn=mse, **options) as pipe:
        await pipe.step(given := x.clone(), y)
    torch.testing.assert_close(model[1].weight.grad, bare.weight.grad)
    assert torch.equal(given, 2 * x)


class _Shifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x.add_(self.by)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
async def test_a_parameter_that_is_added_in_place_to_the_callers_input_has_a_gradient(schedule):
    model = [_Shifts(), nn.Linear(3, 3)]
    mse(model[1](x + model[0].by), y).backward()
    wanted, model[0].by.grad = model[0].by.grad, None
    async with Pipeline(
        model, ["cpu:0", "cpu:1"], microbatches=2, schedule=schedule, checkpoint="never", loss_fn=mse
    ) as pipe:
        await pipe.step(x.clone(), y)
    torch.testing.assert_close(model[0].by.grad, wanted)


def test_in_place_on_the_callers_input_is_seen_by_the_callers_graph():
    model, encoder, given = nn.Sequential(_Overwrites(), nn.Linear(3, 3)), nn.Linear(3, 3), x.clone()
    with Pipeline(model, ["cpu:0"], microbatches=2, checkpoint="never").sync() as pipe:
        loss = encoder(given).sum() + pipe(given).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


async def test_not_open_or_closed():
    pipe = Pipeline(layers(), ["cpu:0"], microbatches=2, loss_fn=mse)
    with pytest.raises(e.PipelineClosedError, match="not open; use 'async with'"):
        await pipe.step(x, y)
    async with pipe:
        await pipe.step(x, y)
    with pytest.raises(e.PipelineClosedError, match="closed"):
        await pipe.step(x, y)
    with pytest.raises(e.PipelineClosedError, match="opens once"):
        await pipe.__aenter__()
    await pipe.aclose()


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.promise(
    "Refused, not wrong", "A sequence with hooks or with its own `forward` is refused, since stages would call neither."
)
@pytest.mark.parametrize("face", [Pipeline, GPipe])
def test_a_sequence_that_does_more_than_call_its_layers(face):
    options = {
        Pipeline: {"devices": ["cpu:0"], "microbatches": 2},
        GPipe: {"balance": [2], "devices": ["cpu"]},
    }
    more = options[face]
    with pytest.raises(e.OptionError, match=r"Doubled, an nn\.Sequential with a forward of its own, which no stage"):
        face(Doubled(nn.Linear(2, 2), nn.Tanh()), **more)
    hooked = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(e.OptionError, match="hooks of its own, which no stage would call"):
        face(hooked, **more)


def test_a_layer_keeps_its_hooks():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inner.register_full_backward_hook(lambda *_: None)
    with Pipeline([nn.Linear(2, 2), inner], ["cpu:0"], microbatches=2).sync() as pipe:
        assert pipe(torch.ones(2, 2)).shape == (2, 2)
