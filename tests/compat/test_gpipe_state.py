"""The state of a ``GPipe``: names, copies, pickles, casts; and that it refuses to be moved."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.compat.torchgpipe.skip import pop, skippable, stash

CPUS = ["cpu"] * 3


@skippable(stash=["a"])
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x):
        yield stash("a", x)
        return self.module(x)


@skippable(pop=["a"])
class Pop(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        a = yield pop("a")
        return x * self.scale + a


def layers(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(Stash(), nn.BatchNorm1d(2), nn.Sequential(nn.Tanh(), Pop()), nn.Linear(2, 2))


def gpipe(seed=1, **options):
    return GPipe(layers(seed), [1, 2, 1], **({"devices": CPUS, "chunks": 2} | options))


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 2)).square().sum().backward()
        optimizer.step()
    return model


def same(state, other):
    assert list(state) == list(other)
    return all(torch.equal(state[name], other[name]) for name in state)


# State dicts

NAMES = [
    "partitions.0.0.module.weight",
    "partitions.0.0.module.bias",
    "partitions.1.1.weight",
    "partitions.1.1.bias",
    "partitions.1.1.running_mean",
    "partitions.1.1.running_var",
    "partitions.1.1.num_batches_tracked",
    "partitions.1.2.1.scale",
    "partitions.2.3.weight",
    "partitions.2.3.bias",
]


def test_names_and_loading():
    trained = train(gpipe())
    assert list(trained.state_dict()) == NAMES
    other = gpipe(seed=2)
    other(torch.randn(4, 2))
    other.load_state_dict(trained.state_dict())
    assert same(other.state_dict(), trained.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(trained.state_dict() | {"more": torch.ones(1)})


def test_the_module_that_went_in_has_the_plain_names():
    plain = layers(seed=2).state_dict()
    module = layers()
    model = GPipe(module, [1, 2, 1], devices=CPUS, chunks=2)
    module.load_state_dict(plain)
    assert same(dict(zip(NAMES, plain.values(), strict=True)), model.state_dict())
    train(model)
    assert same(dict(zip(NAMES, module.state_dict().values(), strict=True)), model.state_dict())


@pytest.mark.parametrize("outer", ["", "net."])
def test_a_state_that_torchgpipe_has_saved(outer):
    trained = train(gpipe(deferred_batch_norm=True))
    saved = trained.state_dict()
    there = {name.replace("0.0.", "0.0.module.").replace("2.1.", "2.1.module."): value for name, value in saved.items()}
    # What its deferred batch norms have gathered.
    there |= {f"partitions.1.1.{name}": torch.zeros(2) for name in ("sum", "sum_squares")}
    there = {outer + name: value for name, value in there.items()}
    assert f"{outer}partitions.0.0.module.module.weight" in there
    before = list(there)
    model = gpipe(seed=2, deferred_batch_norm=True)
    (nn.ModuleDict({"net": model}) if outer else model).load_state_dict(there)
    assert same(model.state_dict(), saved)
    assert list(there) == before


# Copies and pickles


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def forward_only(model):
    model(torch.randn(6, 2)).detach()
    return model


@pytest.mark.parametrize("copy", [deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("before", [lambda model: model, forward_only, train], ids=["new", "forward", "trained"])
def test_copies(no_leaks, before, copy):
    model = before(gpipe(deferred_batch_norm=True))
    twin = copy(model)
    assert same(twin.state_dict(), model.state_dict())
    kept = deepcopy(model.state_dict())
    train(twin, steps=2)
    assert same(kept, model.state_dict())
    train(model, steps=2)
    assert same(twin.state_dict(), model.state_dict())
    assert (twin.devices, twin.balance, twin.chunks) == (model.devices, model.balance, model.chunks)


# Casts and moves


def test_casts(no_leaks):
    model = train(gpipe())
    for cast, dtype in (
        (lambda: model.double(), torch.float64),
        (lambda: model.to(torch.bfloat16), torch.bfloat16),
        (lambda: model.to(dtype=torch.float32), torch.float32),
        (lambda: model.half(), torch.float16),
    ):
        assert cast() is model
        assert {tensor.dtype for tensor in model.parameters()} == {dtype}
        model(torch.ones(4, 2, dtype=dtype)).sum().backward()


MOVES = [
    lambda model: model.cuda(0),
    lambda model: model.cpu(),
    lambda model: model.to(torch.device("cpu")),
    lambda model: model.to(device=0),
    lambda model: model.to("cpu", torch.float64),
    lambda model: model.to(torch.ones(1)),
    lambda model: model.to(tensor=torch.ones(1)),
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: None)
def test_moving_is_denied(move):
    model = gpipe()
    with pytest.raises(TypeError):
        move(model)
    with pytest.raises(TypeError, match=r"denied to move .* keeps each stage on its device.*nn\.Sequential\(\*gpipe\)"):
        model.cpu()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
