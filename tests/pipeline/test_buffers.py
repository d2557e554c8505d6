"""Buffers that a forward changes: gradients and buffers are those of the unsplit model, one micro-batch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from samples import each_value
from torch import Tensor, nn

import asyncpipe
from asyncpipe import Pipeline
from asyncpipe.errors import RecomputeError, SharedParameterError, StageError, TaskError

MODES = ("always", "except_last", "selective", "never")
MICROBATCHES = 4
mse = nn.functional.mse_loss


class Scale(nn.Module):
    """Multiplies by a moving average of its inputs' sizes, which ``write`` stores."""

    def __init__(self, write: Callable[[Scale, Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        self._write(self, 0.5 * self.scale + x.detach().abs().mean(0))
        return x * self.scale


def in_place(layer: Scale, new: Tensor) -> None:
    layer.scale.copy_(new)


def unseen(layer: Scale, new: Tensor) -> None:
    layer.scale.data.copy_(new)  # torch's version counter does not tell.


def replaced(layer: Scale, new: Tensor) -> None:
    layer.scale = new


class FromNothing(nn.Module):
    """Its buffer is made by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        size = x.detach().abs().mean()
        self.mean = size if self.mean is None else 0.5 * self.mean + size
        return x * self.mean


class Codebook(nn.Module):
    """A counter that each forward changes, and a table that only some forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.table.add_(x.detach().mean(0))
        return x * self.table


class Twice(nn.Module):
    """A layer that is called two times, and so changes its buffers two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(Scale(replaced), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Scale(in_place),
    "without a new version": lambda: Scale(unseen),
    "replaced": lambda: Scale(replaced),
    "from nothing": FromNothing,
    "codebook": Codebook,
    "twice": Twice,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "cumulative batch norm": lambda: nn.BatchNorm1d(6, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "frozen batch norm": lambda: nn.BatchNorm1d(6).eval(),
}


DEVICES = ["cpu:0", "cpu:1"]


def model(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), make(), nn.Tanh(), nn.Linear(6, 6), make(), nn.Linear(6, 6)).double()


def batches() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 6, dtype=torch.float64)


def bare(whole: nn.Module, steps: int) -> nn.Module:
    """A copy of the model after ``steps``, micro-batch by micro-batch."""
    x, target = batches()
    alone = copy.deepcopy(whole)
    for _ in range(steps):
        for piece, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (mse(alone(piece), wanted) / MICROBATCHES).backward()
    return alone


def call(
    whole: nn.Module, balance: Sequence[int] | None = (3, 3), *, mode: str = "always", steps: int = 1
) -> nn.Module:
    """The model after as many losses of ``pipe(x)``."""
    options: Any = {} if balance is None else {"balance": list(balance)}
    with Pipeline(whole, DEVICES, checkpoint=mode, microbatches=MICROBATCHES, **options).sync() as pipe:
        for _ in range(steps):
            x, target = batches()
            mse(pipe(x), target).backward()
    return whole


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, atol=1e-10, rtol=0), name
    wanted = dict(theirs.named_buffers())
    assert wanted.keys() == dict(ours.named_buffers()).keys()
    for name, buffer in ours.named_buffers():
        assert torch.allclose(buffer, wanted[name], atol=1e-10, rtol=0), name


@pytest.mark.promise(
    "Right results", "Buffers that a forward changes have the values of the unsplit model after a step."
)
@pytest.mark.promise("Right results", "A buffer that is changed in place stays the same tensor, also if it is resized.")
@each_value(
    ("schedule, mode", [("gpipe", "always"), ("zb-h1", "except_last"), ("1f1b", "never")]),
    ("make", [*LAYERS.values()]),
)
async def test_step(make: Callable[[], nn.Module], schedule: str, mode: str) -> None:
    whole = model(make)
    alone = bare(whole, steps=2)
    held = dict(whole.named_buffers())
    options: Any = {"schedule": schedule, "checkpoint": mode, "microbatches": MICROBATCHES, "loss_fn": mse}
    async with Pipeline(whole, DEVICES, balance=[3, 3], **options) as pipe:
        for _ in range(2):
            await pipe.step(*batches())
    same(whole, alone)
    if make not in (LAYERS["replaced"], FromNothing, Twice):
        assert all(buffer is held[name] for name, buffer in whole.named_buffers()), "buffers stay the same objects"


@pytest.mark.promise(
    "Right results", "Buffers that a forward changes have the values of the unsplit model after a step."
)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_call(make: Callable[[], nn.Module]) -> None:
    for mode in MODES:
        whole = model(make)
        alone = bare(whole, steps=2)
        same(call(whole, mode=mode, steps=2), alone)


def test_two_backwards_through_one_forward_recompute_with_the_same_buffers() -> None:
    whole = model(LAYERS["in place"])
    x, target = batches()
    with Pipeline(whole, DEVICES, balance=[3, 3], checkpoint="always", microbatches=MICROBATCHES).sync() as pipe:
        loss = mse(pipe(x), target)
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in whole.parameters()]
        whole.zero_grad()
        loss.backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(first, whole.parameters(), strict=True))


def test_each_mode_has_its_own_changes() -> None:
    """A batch norm that is frozen after a step, and thawed later, changes its statistics in between only."""
    whole = model(lambda: nn.Sequential(Scale(in_place), nn.BatchNorm1d(6)))
    alone = copy.deepcopy(whole)
    x, target = batches()
    with Pipeline(whole, DEVICES, balance=[3, 3], checkpoint="always", microbatches=MICROBATCHES).sync() as pipe:
        for frozen in (False, True, False):
            for part in (whole, alone):
                part[1][1].train(not frozen)
            mse(pipe(x), target).backward()
            for piece, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                (mse(alone(piece), wanted) / MICROBATCHES).backward()
    same(whole, alone)


@pytest.mark.promise(
    "Right results", "Buffers that a forward changes have the values of the unsplit model after a step."
)
def test_evaluation_mode_and_forwards_without_a_backward() -> None:
    whole = model(LAYERS["in place"]).eval()
    alone = bare(whole, steps=1)
    x, target = batches()
    with Pipeline(whole, DEVICES, balance=[3, 3], microbatches=MICROBATCHES).sync() as pipe:
        mse(pipe(x), target).backward()
        same(whole, alone)
        with torch.no_grad():
            ours, theirs = pipe(x), [alone(piece) for piece in x.chunk(MICROBATCHES)]
    assert torch.allclose(ours, torch.cat(theirs), atol=1e-10, rtol=0)
    same(whole, alone)


class Sent(nn.Module):
    """Passes its buffer on, which the next micro-batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.scale.mul_(0.5)
        return x, self.scale


class Product(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_a_stage_sends(mode: str) -> None:
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(6, 6), Sent(), Product(), nn.Linear(6, 6)).double()
    alone = bare(whole, steps=1)
    same(call(whole, (2, 2), mode=mode), alone)


@pytest.mark.promise(
    "Right results", "Buffers that a forward changes have the values of the unsplit model after a step."
)
@pytest.mark.parametrize("mode", MODES)
def test_a_traced_model(mode: str) -> None:
    whole = model(lambda: nn.Sequential(Scale(in_place), nn.BatchNorm1d(6)))
    alone = bare(whole, steps=2)
    call(asyncpipe.trace(whole, asyncpipe.Arguments.of(batches()[0]), split=["3"]), None, mode=mode, steps=2)
    same(whole, alone)


def test_a_replaced_buffer_beside_a_tied_weight() -> None:
    """The stage works with an image of the module, and the model sees the buffer."""

    class Tied(FromNothing):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.weight)

    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(6, 6))
    whole = nn.Sequential(Tied(weight), nn.Linear(6, 6), Tied(weight)).double()
    whole[0].weight = whole[2].weight = nn.Parameter(weight.detach().double())
    alone = bare(whole, steps=2)
    same(call(whole, (2, 1), steps=2), alone)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("mode", MODES)
def test_lazy_modules_make_their_buffers_in_the_first_forward(mode: str) -> None:
    whole = nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d(), nn.Linear(6, 6)).double()
    call(whole, (2, 1), mode=mode)
    assert whole[1].num_batches_tracked == MICROBATCHES
    assert all(parameter.grad is not None for parameter in whole.parameters())


@pytest.mark.promise(
    "Your own program",
    "Attributes of a module that are not buffers are not watched: a recomputation changes them again.",
)
def test_attributes_that_are_no_buffers_are_changed_again() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    whole = nn.Sequential(Counting(6, 6)).double()
    with Pipeline(whole, DEVICES[:1], checkpoint="always", microbatches=MICROBATCHES).sync() as pipe:
        pipe(batches()[0]).sum().backward()
    assert whole[0].calls == 2 * MICROBATCHES


# Refusals


def refused(whole: nn.Sequential, kind: type[Exception], mode: str = "always") -> str:
    """The message with which training ``whole`` fails, in its first step."""
    with pytest.raises(TaskError) as raised:
        call(whole.double(), (2, 1), mode=mode)
    assert isinstance(raised.value.__cause__, kind)
    return str(raised.value.__cause__)


@pytest.mark.promise(
    "Refused, not wrong",
    "A changed buffer that two stages use is refused; so is a change through another reference to the tensor.",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_a_changed_buffer_that_two_stages_use(mode: str, grad: bool) -> None:
    layer = Scale(in_place)
    with torch.set_grad_enabled(grad):
        message = refused(nn.Sequential(layer, nn.Linear(6, 6), layer), SharedParameterError, mode)
    assert message == (
        "stage 0 changes the buffer '0.scale', which stage 1 uses too, and not in the order of the unsplit model; "
        "split where one stage has both, or give each a buffer of its own"
    )


def test_a_shared_buffer_that_nobody_changes_is_allowed() -> None:
    layer = nn.BatchNorm1d(6).eval()
    layer.momentum = None
    scale = torch.ones(6, dtype=torch.float64)
    parts = [Scale(lambda layer, new: None), Scale(lambda layer, new: None)]
    for part in parts:
        part.scale = scale
    whole = nn.Sequential(parts[0], nn.Linear(6, 6), parts[1]).double()
    alone = bare(whole, steps=1)
    same(call(whole, (2, 1)), alone)


@pytest.mark.promise(
    "Refused, not wrong", "A buffer that is changed for the first time in a later, recomputed forward is refused."
)
def test_a_first_change_that_comes_late() -> None:
    calls = iter(range(100))

    def rarely(layer: Scale, new: Tensor) -> None:
        if next(calls) == 2:
            layer.scale.copy_(new)

    assert refused(nn.Sequential(nn.Linear(6, 6), Scale(rarely), nn.Linear(6, 6)), RecomputeError) == (
        "stage 0 changed the buffer '1.scale' in this forward, but no buffer of its module in the first one, so the "
        "value to recompute with is lost; change one of them in every forward, such as a count of the forwards, or use "
        "checkpoint='never'"
    )


def test_a_change_that_only_the_recomputation_makes() -> None:
    calls = iter(range(100))

    def late(layer: Scale, new: Tensor) -> None:
        if next(calls) == MICROBATCHES:
            layer.scale.copy_(new)

    assert refused(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Scale(late)), RecomputeError) == (
        "the recomputation of stage 1 changed the buffer '2.scale', which its forward did not change; change it in "
        "every forward, or use checkpoint='never'"
    )


@pytest.mark.promise(
    "Refused, not wrong",
    "A changed buffer that two stages use is refused; so is a change through another reference to the tensor.",
)
@pytest.mark.parametrize("mode", MODES)
def test_a_change_that_passes_by_the_module(mode: str) -> None:
    held: list[Tensor] = []

    def elsewhere(layer: Scale, new: Tensor) -> None:
        held[0].copy_(new)

    whole = nn.Sequential(nn.Linear(6, 6), Scale(elsewhere), nn.Linear(6, 6)).double()
    held.append(whole[1].scale)
    assert refused(whole, StageError, mode) == (
        "stage 0 changes the buffer '1.scale' by another reference to its tensor than its module's; change it as "
        "self.buffer, since the module has a copy of it meanwhile"
    )


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


class Normed(nn.Linear):
    """Norms its own weight in each forward, and not through a parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.promise("Refused, not wrong", "A recomputed stage whose forward changes its own parameters is refused.")
def test_a_forward_that_changes_its_parameters() -> None:
    layers = [nn.Linear(6, 6), Normed(6, 6)]
    with Pipeline(layers, ["cpu:0", "cpu:1"], microbatches=2, checkpoint="always", loss_fn=mean_square).sync() as pipe:
        with pytest.raises(TaskError) as caught:
            pipe.step(torch.randn(4, 6))
        assert isinstance(caught.value.__cause__, RecomputeError)
        assert "stage 1 changes its parameter '1.weight' in its forward" in str(caught.value.__cause__)


def test_an_embedding_with_a_largest_norm_is_recomputed() -> None:
    table = nn.Embedding(5, 6, max_norm=1.0)
    twin = copy.deepcopy(table)
    x = torch.tensor([0, 1, 2, 1])
    with Pipeline(
        [table, nn.Tanh()], ["cpu:0"], microbatches=2, checkpoint="always", loss_fn=mean_square
    ).sync() as pipe:
        pipe.step(x)
    for part in x.chunk(2):
        (mean_square(torch.tanh(twin(part))) / 2).backward()
    torch.testing.assert_close(table.weight.grad, twin.weight.grad)


@pytest.mark.promise(
    "Reported, not silent",
    "That batch norms normalise each micro-batch by itself is logged once, before the first step.",
)
@pytest.mark.parametrize("how", ["sequence", "traced", "call", "deferred", "evaluation", "one micro-batch"])
def test_that_batch_norms_see_micro_batches_is_logged_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    if how == "evaluation":
        model[1].eval()
    if how == "traced":
        model = asyncpipe.trace(model, torch.ones(4, 6), split=["1"])
    options: dict[str, Any] = {} if how == "traced" else {"balance": [1, 2], "deferred_batch_norm": how == "deferred"}
    pieces = 1 if how == "one micro-batch" else 2
    with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=pieces, loss_fn=mse, **options).sync() as pipe:
        for _ in range(2):
            if how == "call":
                pipe(torch.randn(8, 6)).sum().backward()
            else:
                pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    told = [record for record in caplog.records if "normalise each micro-batch" in record.message]
    assert len(told) == (how in ("sequence", "traced", "call"))
