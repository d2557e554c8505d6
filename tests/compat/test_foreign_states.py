"""State dicts of torch's ``Pipe`` and torchgpipe, and of other splits: each entry comes to its layer or to none."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from torch import nn

from asyncpipe.compat.torch_pipe import Pipe, PipeSequential, WithDevice
from asyncpipe.compat.torch_pipe.skip import pop, skippable, stash
from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.errors import StateDictError


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


@skippable(stash=["a"])
class Stash(nn.Linear):
    def forward(self, x):
        yield stash("a", x)
        return super().forward(x)


@skippable(pop=["a"])
class Pop(nn.Linear):
    def forward(self, x):
        return super().forward(x) + (yield pop("a"))


def linears(*names):
    """Layers of one shape, so that a wrong place is not seen by its shape."""
    layers = [nn.Linear(2, 2) if name == "linear" else nn.Tanh() for name in names]
    return nn.Sequential(*layers)


def alternating():
    return linears("linear", "tanh", "linear", "tanh", "linear")


def saved(*places, size=2):
    """What linear layers at ``places`` leave in a file: the layers' numbers, in an order of keys that says nothing."""
    entries = {}
    for number, place in enumerate(places):
        entries[f"partitions.{place}.bias"] = torch.full((size,), float(number))
        entries[f"partitions.{place}.weight"] = torch.full((size, size), float(number))
    return dict(sorted(entries.items(), reverse=True))


def numbers(model):
    return [layer.weight[0, 0].item() for layer in model if isinstance(layer, nn.Linear)]


@pytest.mark.promise("Versions", "The partitions and names of a `Pipe` are torch's.")
def test_partitions_and_names_are_those_of_torch():
    model = Pipe(
        nn.Sequential(
            nn.ReLU(),
            nn.Linear(2, 2),
            nn.Dropout(),
            nn.Sequential(),
            nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
            PipeSequential(nn.Tanh(), nn.Linear(2, 2)),
            WithDevice(nn.ReLU(), "cpu"),
            WithDevice(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), "cpu:5"),
            WithDevice(nn.Linear(2, 2), "cpu:5"),
            nn.BatchNorm1d(2, affine=False),
        )
    )
    owners = list(OrderedDict.fromkeys(name.rpartition(".")[0] for name in model.state_dict()))
    assert owners == [f"partitions.{place}" for place in ("1.0", "4.0", "5.1", "7.1", "8.0", "9.0")]
    assert list(map(len, model.partitions)) == [1, 1, 1, 0, 2, 2, 1, 2, 1, 1]
    assert model.devices == [torch.device("cpu")] * 10
    # Private: which devices the stages are on.
    assert [stage.device.name for stage in model._pipeline.stages] == [
        "cpu:0",
        "cpu:1",
        "cpu:2",
        "cpu:3",
        "cpu:5",
        "cpu:4",
    ]
    x = torch.randn(4, 2)
    model.eval()
    assert torch.allclose(model(x).local_value(), nn.Sequential(*model)(x))


def test_partitions_that_share_a_stage_have_their_hooks():
    model, seen = Pipe(alternating(), chunks=2), []
    for index, part in enumerate(model.partitions):
        part.register_forward_hook(lambda part, inputs, output, index=index: seen.append(index))
    with torch.no_grad():
        model(torch.ones(2, 2))
    assert sorted(seen) == sorted([0, 1, 2, 3, 4] * 2)


@pytest.mark.promise(
    "Versions", "A state dict of torch's `Pipe` or torchgpipe's `GPipe` loads with any placement and balance."
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "places",
    [
        ("0.0", "2.0", "4.0"),  # on the CPU
        ("0.0", "0.2", "0.4"),  # as one sequence
        ("0.0", "2.0", "3.0"),  # each GPU has some, Tanh is on the CPU or in WithDevice
        ("0.0", "2.0", "2.2"),
        ("0.0", "2.0", "10.0"),
    ],
)
def test_a_state_of_any_placement(places, strict):
    model = Pipe(alternating())
    result = model.load_state_dict(saved(*places), strict=strict)
    assert numbers(model) == [0, 1, 2]
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


def test_a_part_of_a_state_goes_where_its_names_are():
    model = Pipe(alternating())
    part = {name: value for name, value in saved("0.0", "2.0", "4.0").items() if "4.0" in name}
    before = numbers(model)
    assert len(model.load_state_dict(part, strict=False).missing_keys) == 4
    assert numbers(model) == [*before[:2], 2]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(part)
    longer = saved("0.0", "2.0", "4.0", "6.0")
    assert len(model.load_state_dict(longer, strict=False).unexpected_keys) == 2
    assert numbers(model) == [0, 1, 2]


@pytest.mark.promise(
    "Versions", "A part of a foreign state dict is loaded if its names are clear, and refused as a whole otherwise."
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "state",
    [
        saved("0.0", "0.2"),  # a part, of another placement
        saved("0.0", "1.0", "2.0", "5.0"),  # of a longer model
        saved("0.0", "2.0", "3.0", size=3),
        saved("0.0", "2.0") | {"partitions.3.0.weight": torch.ones(2, 2)},
    ],
)
def test_what_might_come_to_a_wrong_layer_is_refused(state, strict):
    model = Pipe(alternating())
    before = deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match=r"whole state dict of the same layers fits whatever its partitions are"):
        model.load_state_dict(state, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_refusal_says_where_the_layers_are():
    with pytest.raises(RuntimeError) as caught:
        Pipe(alternating()).load_state_dict(saved("0.0", "0.2"), strict=False)
    assert str(caught.value) == (
        "the layers of the state dict are at partitions.{0.0, 0.2}, those of this Pipe at partitions.{0.0, 2.0, 4.0}, "
        "and they are not the same layers one by one; a whole state dict of the same layers fits whatever its "
        "partitions are, and a part of one must have the names of this split and no others"
    )


@pytest.mark.promise(
    "Versions", "A state dict of torch's `Pipe` or torchgpipe's `GPipe` loads with any placement and balance."
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_torchgpipe_with_another_balance(strict):
    model = GPipe(alternating(), [1, 3, 1], devices=["cpu"] * 3)
    model.load_state_dict(saved("0.0", "0.2", "1.4"), strict=strict)
    assert numbers(model) == [0, 1, 2]
    named = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Tanh(), c=nn.Linear(2, 2)))
    model = GPipe(named, [1, 2], devices=["cpu"] * 2)
    model.load_state_dict(saved("0.a", "2.c"), strict=strict)
    assert numbers(model) == [0, 1]


@pytest.mark.promise(
    "Versions", "A part of a foreign state dict is loaded if its names are clear, and refused as a whole otherwise."
)
def test_a_part_of_a_state_of_torchgpipe_with_another_balance():
    model = GPipe(alternating(), [1, 3, 1], devices=["cpu"] * 3)
    before = numbers(model)
    model.load_state_dict(saved("0.2"), strict=False)
    assert numbers(model) == [before[0], 0, before[2]]
    assert len(model.load_state_dict(saved("0.2", "1.7"), strict=False).unexpected_keys) == 2
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(saved("0.2"))


def test_from_one_face_to_the_other():
    pipe, gpipe = Pipe(alternating()), GPipe(alternating(), [2, 3], devices=["cpu"] * 2)
    for one, other in ((pipe, gpipe), (gpipe, pipe)):
        torch.manual_seed(len(one.partitions))
        for parameter in one.parameters():
            nn.init.normal_(parameter)
        other.load_state_dict(one.state_dict())
        assert numbers(one) == numbers(other)
    # Without names that are unique, a part says not where it belongs.
    with pytest.raises(StateDictError, match="this GPipe"):
        gpipe.load_state_dict(saved("0.0", "2.0"), strict=False)


def test_a_sequence_of_ones_own_that_torch_took_apart():
    def model():
        return nn.Sequential(Residual(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Tanh(), nn.Linear(2, 2))

    pipe = Pipe(model())
    for places in (("0.0", "0.1", "2.0"), ("0.0", "0.1", "0.3")):
        pipe.load_state_dict(saved(*places))
        assert [pipe[0][0].weight[0, 0], pipe[0][1].weight[0, 0], pipe[2].weight[0, 0]] == [0, 1, 2]
    assert next(iter(pipe.state_dict())) == "partitions.0.0.0.weight"


@pytest.mark.parametrize("outer", ["", "net."])
def test_skips_and_deferred_batch_norms_of_another_placement(outer):
    model = Pipe(nn.Sequential(Stash(2, 2), nn.Tanh(), nn.BatchNorm1d(2), Pop(2, 2)), deferred_batch_norm=True)
    state = {
        f"partitions.0.{name}": torch.ones(2) for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var")
    }
    state |= {"partitions.0.1.num_batches_tracked": torch.tensor(7), "partitions.0.1.sum": torch.ones(2)}
    state |= {
        name.replace(".weight", ".module.weight").replace(".bias", ".module.bias"): value
        for name, value in saved("0.0", "1.0").items()
    }
    root = nn.ModuleDict({"net": model}) if outer else model
    root.load_state_dict({outer + name: value for name, value in state.items()})
    assert (model[0].bias[0].item(), model[2].num_batches_tracked.item(), model[3].bias[0].item()) == (0, 7, 1)
    assert not any("module" in name or "sum" in name for name in model.state_dict())
