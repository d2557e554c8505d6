"""``y = pipe(x)`` behaves as the model: in any graph of the caller, gradients are those of the bare model."""

from __future__ import annotations

import itertools

import pytest
import torch
from dropin_helpers import assert_equal, gradients, pipeline, rows
from torch import nn

from asyncpipe import Arguments, Microbatches, NoChunk

MODES = ("always", "except_last", "selective", "never")


@pytest.mark.parametrize(
    ("schedule", "stages", "devices"),
    [("gpipe", 1, 1), ("gpipe", 3, 3), ("1f1b", 2, 2), ("1f1b", 4, 4), ("interleaved", 2, 1), ("interleaved", 4, 2)],
)
def test_equal_to_the_bare_model(workload, schedule, stages, devices):
    """The caller has layers before and after the pipeline, and a leaf that gets a gradient."""
    torch.manual_seed(5)
    front, back = nn.Linear(6, 6).double(), nn.Linear(8, 3).double()
    bare, model = workload.model(), workload.model()
    mine = [*front.parameters(), *back.parameters()]
    batches = [rows(n).requires_grad_() for n in (12, 13, 5)]
    expected = [gradients(back(bare(front(x))).square().mean(), [x, *mine, *bare.parameters()]) for x in batches]
    for mode, microbatches in itertools.product(MODES, (1, 3, 8)):
        options = {"schedule": schedule, "checkpoint": mode, "microbatches": microbatches}
        with pipeline(model, devices, stages=stages, **options).sync() as pipe:
            for x, wanted in zip(batches, expected, strict=True):
                got = gradients(back(pipe(front(x))).square().mean(), [x, *mine, *model.parameters()])
                assert_equal(got, wanted, (mode, microbatches, len(x)))


# Outputs and inputs of all kinds


class Heads(nn.Module):
    """Outputs of all kinds: with gradients, one of them twice, the input itself, integers, and no tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return {
            "index": a.argmax(1),
            "a": a,
            "detached": b.detach(),
            "more": (b, None),
            "name": "heads",
            "b": b,
            "x": x,
        }


def heads_model(workload):
    model = workload.model()
    torch.manual_seed(8)
    return model.append(Heads().double())


LOSSES = {
    "one": lambda out: out["a"].square().sum(),
    "the other": lambda out: out["more"][0].square().sum(),
    "both": lambda out: (out["a"].sum(1) * out["more"][0].sum(1)).sum() + out["detached"].sum(),
    "one twice": lambda out: (out["b"].sin() * out["more"][0].cos()).sum() + out["x"].square().sum(),
    "a sample": lambda out: out["a"][3].sum(),
}


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_all_kinds(workload, mode):
    bare, model = heads_model(workload), heads_model(workload)
    x = rows(7).requires_grad_()
    with pipeline(model, checkpoint=mode, microbatches=3).sync() as pipe:
        for name, loss in LOSSES.items():
            ours, theirs = pipe(x), bare(x)
            assert torch.equal(ours["index"], theirs["index"])
            assert not ours["index"].requires_grad
            # A forward that will be recomputed cannot tell which of its outputs need no gradient.
            assert mode != "never" or not ours["detached"].requires_grad
            assert (ours["name"], ours["more"][1]) == (["heads"] * 3, None)
            got = gradients(loss(ours), [x, *model.parameters()])
            assert_equal(got, gradients(loss(theirs), [x, *bare.parameters()]), name)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_may_be_overwritten(workload, mode):
    bare, model, x = heads_model(workload), heads_model(workload), rows(7).requires_grad_()

    def overwritten(output):
        output["a"].add_(1).mul_(output["more"][0][:, :2])[0] = 3.0
        return output["a"].square().sum()

    wanted = gradients(overwritten(bare(x)), [x, *bare.parameters()])
    with pipeline(model, checkpoint=mode).sync() as pipe:
        assert_equal(gradients(overwritten(pipe(x)), [x, *model.parameters()]), wanted)
        outputs = pipe(Microbatches(list(x.split(3))))
        loss = sum(overwritten(output) for output in outputs)
        wanted = gradients(sum(overwritten(bare(part)) for part in x.split(3)), [x, *bare.parameters()])
        assert_equal(gradients(loss, [x, *model.parameters()]), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_on_a_part_of_the_batch(workload, mode):
    bare, model = workload.model(), workload.model()
    x = rows(11).requires_grad_()
    with pipeline(model, 3, checkpoint=mode).sync() as pipe:
        for part in (slice(0, 2), slice(4, 5), slice(5, 7), slice(-1, None), slice(0, None, 10)):
            got = gradients(pipe(x)[part].square().sum(), [x, *model.parameters()])
            assert_equal(got, gradients(bare(x)[part].square().sum(), [x, *bare.parameters()]), part)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_some_ready_made_micro_batches(workload, mode):
    """All subsets of four outputs: exits that the engine never reaches must not block the others."""
    bare, model = workload.model(), workload.model()
    pieces = [rows(n).requires_grad_() for n in (3, 1, 4, 2)]
    with pipeline(model, checkpoint=mode).sync() as pipe:
        for choice in itertools.product((False, True), repeat=4):
            used = [i for i in range(4) if choice[i]]
            if used:
                outputs = pipe(Microbatches(pieces))
                assert [len(output) for output in outputs] == [3, 1, 4, 2]
                got = gradients(sum(outputs[i].square().sum() for i in used), [*pieces, *model.parameters()])
                loss = sum(bare(pieces[i]).square().sum() for i in used)
                assert_equal(got, gradients(loss, [*pieces, *bare.parameters()]), used)


class Several(nn.Module):
    """Takes two tensors of samples, a keyword, and a tensor that all samples share."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, y, *, shared, scale=1.0):
        return torch.tanh(self.linear(x) + scale * y @ shared)


@pytest.mark.parametrize("mode", MODES)
def test_arguments_of_all_kinds(mode):
    torch.manual_seed(6)
    several, more = Several().double(), nn.Linear(6, 4).double()
    x, y = rows(7).requires_grad_(), rows(7).mul(2).requires_grad_()
    shared = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, y, shared, *several.parameters(), *more.parameters()]
    choices = [lambda: (x, y), lambda: (x, x), lambda: (x * 2, x), lambda: (x.detach(), y)]
    with pipeline([several, more], 2, checkpoint=mode, microbatches=3).sync() as pipe:
        for choose in choices:
            got = gradients(pipe(*choose(), shared=NoChunk(shared), scale=0.5).sin().sum(), leaves)
            loss = more(several(*choose(), shared=shared, scale=0.5)).sin().sum()
            assert_equal(got, gradients(loss, leaves))
        ready_made = Microbatches([Arguments.of(x, y, shared=shared), Arguments.of(y, y, shared=NoChunk(shared * 3))])
        got = gradients(sum(out.sin().sum() for out in pipe(ready_made)), leaves)
        loss = more(several(x, y, shared=shared)).sin().sum() + more(several(y, y, shared=shared * 3)).sin().sum()
        assert_equal(got, gradients(loss, leaves))


# Modes of the caller and of the model


def test_without_gradients(workload):
    model = workload.model()
    x = rows(7).requires_grad_()
    with pipeline(model).sync() as pipe:
        with torch.no_grad():
            assert not pipe(x).requires_grad
        with torch.inference_mode():
            output = pipe(x)
            assert output.is_inference()
        assert (output - model(x)).abs().max() < 1e-10
        model.requires_grad_(False)
        assert not pipe(x.detach()).requires_grad
        model.requires_grad_(True)
        assert pipe(x.detach()).requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_mode_has_gradients_and_recomputes_nothing(workload, mode):
    bare, model = workload.model(dropout=0.5).eval(), workload.model(dropout=0.5)
    calls = []
    model[3].register_forward_hook(lambda *_: calls.append(1))
    x = rows(7).requires_grad_()
    with pipeline(model, checkpoint=mode).sync() as pipe:
        pipe.eval()
        got = gradients(pipe(x).square().sum(), [x, *model.parameters()])
        assert len(calls) == 4
        assert_equal(got, gradients(bare(x).square().sum(), [x, *bare.parameters()]))
        pipe.train()
        pipe(x).sum().backward()
        assert len(calls) == 8 + {"always": 4, "selective": 4, "except_last": 3, "never": 0}[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [range(4), (0, 5), range(8)], ids=str)
def test_frozen_parameters(workload, mode, frozen):
    bare, model = workload.model(), workload.model()
    for k in frozen:
        bare[k].requires_grad_(False)
        model[k].requires_grad_(False)
    with pipeline(model, 4, checkpoint=mode).sync() as pipe:
        for x in (rows(7).requires_grad_(), rows(7)):
            if x.requires_grad or len(frozen) < 8:
                got = gradients(pipe(x).square().sum(), [x, *model.parameters()])
                assert_equal(got, gradients(bare(x).square().sum(), [x, *bare.parameters()]))


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_that_of_the_forward(mode):
    """The backward, and so the recomputation, run outside the caller's autocast."""

    def make():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    model, bare = make(), make()
    x, target = rows(8, 16).float(), rows(9, 16).float()[:8]
    with pipeline(model, checkpoint=mode).sync() as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = pipe(x)
        assert output.dtype is torch.bfloat16
        got = gradients(nn.functional.mse_loss(output.float(), target), list(model.parameters()))
    parts = []
    for part in x.split(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            parts.append(bare(part))
    assert torch.equal(torch.cat(parts), output)
    wanted = gradients(nn.functional.mse_loss(torch.cat(parts).float(), target), list(bare.parameters()))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_the_same_in_all_recomputation_modes(workload):
    made = {}
    for mode in MODES:
        model = workload.model(dropout=0.5)
        with pipeline(model, 3, checkpoint=mode).sync() as pipe:
            torch.manual_seed(3)
            output = pipe(workload.x)
            torch.manual_seed(99)
            made[mode] = [output.detach(), *gradients(output.square().sum(), list(model.parameters()))]
    for mode in ("always", "except_last"):
        assert all(torch.equal(a, b) for a, b in zip(made[mode], made["never"], strict=True))
    assert not torch.equal(made["never"][0], workload.outputs)


@pytest.mark.parametrize("mode", MODES)
def test_deferred_batch_norm(mode):
    def make():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()

    bare, model, x = make(), make(), rows(11)
    bare(x)
    with pipeline(model, checkpoint=mode, microbatches=3, deferred_batch_norm=True).sync() as pipe:
        loss = pipe(x).square().sum()
        for _ in range(2):  # After the forward, and again after the backward.
            ours, theirs = model[1].state_dict(), bare[1].state_dict()
            assert all((ours[name] - theirs[name]).abs().max() < 1e-10 for name in theirs)
            assert ours["num_batches_tracked"] == 1
            if loss.requires_grad:
                loss.backward()
                loss = loss.detach()
