"""Stages: devices are resolved, the model is split and placed, and its parameters keep their names and identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asyncpipe.errors import BalanceError, DeviceError, OptionError, SharedParameterError
from asyncpipe.ops.stage import Device, as_sequential, place, resolve_devices, split

CPU = torch.device("cpu")
META = torch.device("meta")


def model(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


# Devices


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (["cpu"], ["cpu"]),
        (["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
        (["cpu:7", "cpu:3"], ["cpu:7", "cpu:3"]),
        (["cpu:0", "cpu:0", "cpu:1", "cpu:0"], ["cpu:0", "cpu:0#1", "cpu:1", "cpu:0#2"]),
        (["cpu", "cpu:0"], ["cpu", "cpu:0"]),
        ([torch.device("cpu"), "cpu"], ["cpu", "cpu#1"]),
        (("cpu:0",), ["cpu:0"]),
    ],
)
def test_logical_devices(entries: Any, names: list[str]) -> None:
    devices = resolve_devices(entries)
    assert [device.name for device in devices] == names
    assert {device.physical for device in devices} == {CPU}
    assert not any(device.is_cuda for device in devices)


@pytest.mark.parametrize("entries", [[], (), "cpu:0", "cuda", CPU, None])
def test_devices_are_a_list(entries: Any) -> None:
    with pytest.raises(DeviceError) as raised:
        resolve_devices(entries)
    assert str(raised.value) == f"devices must be a list such as ['cpu:0', 'cpu:1'], got {entries!r}"


@pytest.mark.parametrize("entry", ["tpu:0", "gpu", "", "cpu:x", None, 1.5, object])
def test_what_is_no_device(entry: Any) -> None:
    with pytest.raises(DeviceError) as raised:
        resolve_devices(["cpu", entry])
    assert str(raised.value) == f"{entry!r} is no device; asyncpipe knows 'cpu:N' and 'cuda:N'"


@pytest.mark.parametrize("entry", ["meta", "mps", "xpu:1", META])
def test_other_kinds_of_devices(entry: Any) -> None:
    with pytest.raises(
        DeviceError, match=r"is a device of kind '(meta|mps|xpu)'; asyncpipe knows 'cpu:N' and 'cuda:N'"
    ):
        resolve_devices([entry])


@pytest.mark.parametrize(
    ("count", "there"), [(0, "no CUDA device"), (1, "cuda:0"), (2, "cuda:0, cuda:1")], ids=["none", "one", "two"]
)
def test_a_cuda_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, count: int, there: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for entry in (f"cuda:{count}", "cuda:9", torch.device("cuda", 7)):
        with pytest.raises(DeviceError) as raised:
            resolve_devices([entry])
        assert str(raised.value) == f"{entry!r} is not there; this machine has {there}, and 'cpu:N' for any N"


def test_cuda_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = resolve_devices(["cuda:0", "cuda:0", "cuda", "cpu"])
    assert [device.name for device in devices] == ["cuda:0", "cuda:0#1", "cuda", "cpu"]
    assert [device.physical for device in devices] == [*[torch.device("cuda", 0)] * 2, torch.device("cuda", 1), CPU]
    assert [device.is_cuda for device in devices] == [True, True, True, False]


# The model


def test_a_sequential_is_itself_and_a_list_is_wrapped() -> None:
    sequence = model()
    assert as_sequential(sequence) is sequence
    layers = [nn.Linear(2, 2), nn.ReLU()]
    assert list(as_sequential(layers)) == layers
    assert list(as_sequential(tuple(layers))) == layers


@pytest.mark.parametrize("bad", [nn.Linear(2, 2), [nn.ReLU(), 3], "model", None, {"a": nn.ReLU()}])
def test_what_is_no_model(bad: Any) -> None:
    with pytest.raises(OptionError, match=f"must be an nn.Sequential or a list of modules, got {type(bad).__name__}"):
        as_sequential(bad)


@pytest.mark.parametrize("empty", [[], nn.Sequential()], ids=["list", "sequential"])
def test_a_model_has_layers(empty: Any) -> None:
    with pytest.raises(OptionError, match="model has no layers; give at least one a stage"):
        as_sequential(empty)


# Splitting


def test_a_balance_is_followed_and_names_are_kept() -> None:
    whole = model()
    parts = split(whole, [1, 3], 2)
    assert [list(part._modules) for part in parts] == [["0"], ["1", "2", "3"]]
    assert [layer for part in parts for layer in part] == list(whole)
    assert [key for part in parts for key in part.state_dict()] == list(whole.state_dict())
    owned = [id(parameter) for part in parts for parameter in part.parameters()]
    assert owned == [id(parameter) for parameter in whole.parameters()]


def test_names_of_layers_are_kept() -> None:
    whole = nn.Sequential()
    whole.add_module("embed", nn.Linear(2, 2))
    whole.add_module("head", nn.Linear(2, 2))
    assert [list(part.state_dict()) for part in split(whole, [1, 1], 2)] == [
        ["embed.weight", "embed.bias"],
        ["head.weight", "head.bias"],
    ]


def test_auto_spreads_parameters() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 100))
    assert [len(part) for part in split(whole, "auto", 2)] == [3, 1]


BAD_BALANCES = {
    "word": ("even", 2, "balance must be 'auto' or a list of integers, got 'even'"),
    "sum": ([1, 2], 2, "balance [1, 2] sums up to 3, but the model has 4 layers; it must sum up to 4"),
    "entries": ([1, 1, 2], 2, "balance [1, 1, 2] has 3 entries for 2 stages; give one a stage"),
    "zero": ([0, 4], 2, "balance must be a list of positive integers, one a stage, got [0, 4]"),
    "auto": ("auto", 5, "cannot split 4 layers into 5 stages; give at most as many stages as layers"),
}


@pytest.mark.parametrize(("balance", "stages", "message"), BAD_BALANCES.values(), ids=BAD_BALANCES.keys())
def test_balances_that_do_not_fit(balance: Any, stages: int, message: str) -> None:
    with pytest.raises(BalanceError) as raised:
        split(model(), balance, stages)
    assert str(raised.value) == message


# Placing


def test_stages_are_placed_and_parameters_stay_the_same_objects() -> None:
    whole = model()
    before = list(whole.parameters())
    devices = resolve_devices(["cpu:0", "cpu:1"])
    stages = place(split(whole, [1, 1, 2], 3), [0, 1, 0], devices)
    assert [stage.index for stage in stages] == [0, 1, 2]
    assert [stage.device.name for stage in stages] == ["cpu:0", "cpu:1", "cpu:0"]
    assert all(a is b for a, b in zip(before, whole.parameters(), strict=True))
    x = torch.ones(1, 2)
    expected = whole(x)
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, expected)


def test_a_stage_is_moved_to_its_device() -> None:
    parts = split(model(2), [1, 1], 2)
    place(parts, [0, 1], [Device("cpu", CPU), Device("meta", META)])
    assert [next(part.parameters()).device for part in parts] == [CPU, META]


def tied() -> nn.Sequential:
    whole = model(3)
    whole[2].weight = whole[0].weight
    return whole


def test_a_parameter_shared_over_devices_is_refused_before_anything_moves() -> None:
    parts = split(tied(), [1, 1, 1], 3)
    with pytest.raises(SharedParameterError) as raised:
        place(parts, [1, 1, 0], [Device("cpu", CPU), Device("meta", META)])
    assert str(raised.value) == (
        "parameter '2.weight' is used by stage 0 and stage 2 on different devices; choose a balance that puts both "
        "layers on one device, or give each its own parameter"
    )
    assert {parameter.device for part in parts for parameter in part.parameters()} == {CPU}


def test_two_logical_devices_are_different_even_on_one_physical_device() -> None:
    """Their threads would add to the same gradient at the same time."""
    with pytest.raises(SharedParameterError):
        place(split(tied(), [1, 2], 2), [0, 1], resolve_devices(["cpu:0", "cpu:0"]))


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 0]])
def test_a_parameter_may_be_shared_on_one_device(placement: list[int]) -> None:
    whole = tied()
    stages = place(split(whole, [1, 1, 1], 3), placement, resolve_devices(["cpu:0", "cpu:1"]))
    assert stages[2].module[0].weight is whole[0].weight


def test_stages_that_work_in_place_get_a_copy_of_their_input() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(inplace=True)), nn.ReLU())
    stages = place(split(whole, [1, 1, 1], 3), [0, 0, 0], resolve_devices(["cpu"]))
    assert [stage.copies_input for stage in stages] == [False, True, False]
