"""TorchScript modules as layers and stages: the gradients and buffers of the unsplit model, or a refusal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from samples import pairs
from torch import Tensor, nn

import asyncpipe
from asyncpipe import Pipeline
from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.errors import OptionError, SharedParameterError, TraceError
from asyncpipe.ops.model.measure_layers import balance_by_size, balance_by_time
from asyncpipe.ops.model.microbatch import Arguments

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]*` is (deprecated|not supported)")

mse = nn.functional.mse_loss


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Scaled(nn.Module):
    """Nested, with a buffer of its own, and one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh()) * self.scale


def scripted(layer: nn.Module) -> nn.Module:
    return torch.jit.script(layer)


def traced(layer: nn.Module) -> nn.Module:
    statistics = copy.deepcopy(layer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        made = torch.jit.trace(layer, torch.randn(3, 4), check_trace=False)
    made.load_state_dict(statistics)  # The trace has run the layer.
    return made


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


kinds = pytest.mark.parametrize("make", [scripted, traced], ids=["scripted", "traced"])


def microbatch_by_microbatch(model: nn.Module, x: Tensor, target: Tensor) -> list[Tensor]:
    """The gradients and then the buffers of ``model`` itself, after two steps of four micro-batches."""
    for _ in range(2):
        for piece, its_target in zip(x.chunk(4), target.chunk(4), strict=True):
            (mse(model(piece), its_target) / 4).backward()
    return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.promise("Right results", "TorchScript modules are layers and stages like others, also in `GPipe`.")
@pairs(
    ("make", [scripted, traced]),
    ("checkpoint", ["always", "except_last", "never"]),
    ("schedule", ["1f1b", "zb-h1"]),
    ("face", ["step", "call"]),
)
def test_torch_script_equals_the_unsplit_model(
    make: Callable[[nn.Module], nn.Module], checkpoint: str, schedule: str, face: str
) -> None:
    """Two steps, since TorchScript differentiates its graph as a whole from the second call on."""
    plain = nn.Sequential(nn.Linear(4, 4), Scaled(), norm(), Scaled(), nn.BatchNorm1d(4))
    model = nn.Sequential(*(make(layer) for layer in copy.deepcopy(plain)))
    model[0] = copy.deepcopy(plain[0])
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    wanted = microbatch_by_microbatch(plain, x, target)
    pipe = Pipeline(
        model,
        ["cpu:0", "cpu:1", "cpu:2"],
        microbatches=4,
        loss_fn=mse,
        schedule=schedule,
        checkpoint=checkpoint,
        balance=[2, 2, 1],
    )
    assert list(pipe.state_dict()) == list(plain.state_dict())
    with pipe.sync() as running:
        for _ in range(2):
            if face == "step":
                running.step(x, target)
            else:
                mse(running(x), target).backward()
    found = [*(parameter.grad for parameter in model.parameters()), *model.buffers()]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.promise("Right results", "TorchScript modules are layers and stages like others, also in `GPipe`.")
@kinds
def test_the_drop_in_takes_torch_script(make: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(8, 4)
    plain = nn.Sequential(Scaled(), Scaled())
    plain(x).sum().backward()
    model = nn.Sequential(*(make(layer) for layer in copy.deepcopy(plain)))
    model.zero_grad()
    GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=4)(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)


@kinds
def test_torch_script_is_measured(make: Callable[[nn.Module], nn.Module]) -> None:
    """On a copy: a gradient of the copy that went to the original would show."""
    model = nn.Sequential(make(Scaled()), make(norm()), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    sample = torch.randn(8, 4), torch.randn(8, 4)
    assert sum(balance_by_time(2, model, sample[0], seconds=0)) == 3
    assert sum(balance_by_size(2, model, sample[0])) == 3
    Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, loss_fn=mse, schedule="gpipe", sample=sample)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Refusals


def refused(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(message)


def shared(layer: nn.Module) -> Sequence[nn.Module]:
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.promise(
    "Refused, not wrong", "What cannot be right with TorchScript is refused when the pipeline is made."
)
def test_what_cannot_be_right_with_torch_script_is_refused() -> None:
    whole = scripted(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    devices = ["cpu:0", "cpu:1"]
    refused(
        OptionError,
        "the model is one piece of TorchScript (Sequential), which cannot be cut into stages",
        lambda: Pipeline(whole, devices, microbatches=2),
    )
    Pipeline(list(whole.children()), devices, microbatches=2)
    refused(
        SharedParameterError,
        "stage 0 and stage 1, on different devices, share 'weight' of a TorchScript Linear",
        lambda: Pipeline(shared(scripted(nn.Linear(4, 4))), devices, microbatches=2, balance=[2, 1]),
    )
    refused(
        OptionError,
        "layer '0.1' is a BatchNorm1d in TorchScript, which cannot be deferred",
        lambda: Pipeline(nn.Sequential(scripted(norm()), norm()), devices, microbatches=2, deferred_batch_norm=True),
    )
    refused(
        OptionError,
        "parameter '0.weight' is computed from another one, to which its gradient would go",
        lambda: Pipeline(nn.Sequential(*copy.deepcopy(whole).children()), devices, microbatches=2),
    )
    example = Arguments.of(torch.randn(2, 4))
    refused(
        TraceError,
        "submodule '1' is TorchScript, which cannot be traced",
        lambda: asyncpipe.trace(nn.Sequential(nn.Tanh(), whole), example, split=2),
    )
    refused(TraceError, "the model is TorchScript", lambda: asyncpipe.trace(whole, example, split=2))


def test_torch_script_on_one_device_may_be_shared() -> None:
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    plain = shared(nn.Linear(4, 4))
    model = shared(scripted(copy.deepcopy(plain[0])))
    wanted = microbatch_by_microbatch(plain, x, target)[0]
    with Pipeline(model, ["cpu:0"], stages=2, microbatches=4, loss_fn=mse, schedule="interleaved").sync() as pipe:
        pipe.step(x, target)
        pipe.step(x, target)
    torch.testing.assert_close(next(model.parameters()).grad, wanted, rtol=0, atol=1e-10)
