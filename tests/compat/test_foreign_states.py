"""State dicts of torchgpipe with another balance: each entry comes to its layer or to none."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.errors import StateDictError


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


@pytest.mark.promise("Versions", "A state dict of torchgpipe's `GPipe` loads with any balance.")
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


@pytest.mark.promise(
    "Versions", "A part of a foreign state dict is loaded if its names are clear, and refused as a whole otherwise."
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_in_which_two_layers_have_one_name_is_refused(strict):
    model = GPipe(alternating(), [2, 3], devices=["cpu"] * 2)
    before = numbers(model)
    with pytest.raises(StateDictError, match=r"at partitions\.\{0\.0, 2\.0\}, and two of them have one name"):
        model.load_state_dict(saved("0.0", "2.0"), strict=strict)
    assert numbers(model) == before
