"""Stages: devices are resolved, the model is split and placed, and its parameters keep their names and identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import BalanceError, DeviceError, SharedParameterError
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.sequential import SequentialStage, split, stage_parts
from asyncpipe.ops.model.stage import CALLER, Stage, StagedModel
from asyncpipe.ops.model.ties import place

CPU = torch.device("cpu")
META = torch.device("meta")


def model(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def in_stages(whole: nn.Sequential, balance: list[int]) -> StagedModel:
    return stage_parts(whole, split(whole, balance, len(balance)))


# Devices


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (["cpu"], ["cpu"]),
        (["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
        (["cpu:0", "cpu:0", "cpu:1", "cpu:0"], ["cpu:0", "cpu:0#1", "cpu:1", "cpu:0#2"]),
        (["cpu", "cpu:0"], ["cpu", "cpu:0"]),
    ],
)
def test_logical_devices(entries: Any, names: list[str]) -> None:
    devices = resolve_devices(entries)
    assert [device.name for device in devices] == names
    assert {device.physical for device in devices} == {CPU}
    assert not any(device.is_accelerator for device in devices)


@pytest.mark.parametrize("entry", ["tpu:0", "gpu", "", "cpu:x", None, 1.5, object])
def test_what_is_no_device(entry: Any) -> None:
    with pytest.raises(DeviceError) as raised:
        resolve_devices(["cpu", entry])
    assert str(raised.value) == f"{entry!r} is no device; asyncpipe knows 'cpu:N' and 'cuda:N'"


@pytest.mark.parametrize(
    ("count", "there"), [(0, "no CUDA device"), (1, "cuda:0"), (2, "cuda:0, cuda:1")], ids=["none", "one", "two"]
)
def test_a_cuda_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, count: int, there: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for entry in (f"cuda:{count}", "cuda:9", "cuda:256", "cuda:99999", torch.device("cuda", 7)):
        with pytest.raises(DeviceError) as raised:
            resolve_devices([entry])
        assert str(raised.value) == f"{entry!r} is not there; this machine has {there}, and 'cpu:N' for any N"


# Splitting


def test_a_balance_is_followed_and_names_are_kept() -> None:
    whole = model()
    parts = split(whole, [1, 3], 2)
    assert [list(part._modules) for part in parts] == [["0"], ["1", "2", "3"]]
    assert [layer for part in parts for layer in part] == list(whole)
    assert [key for part in parts for key in part.state_dict()] == list(whole.state_dict())
    owned = [id(parameter) for part in parts for parameter in part.parameters()]
    assert owned == [id(parameter) for parameter in whole.parameters()]


BAD_BALANCES = {
    "word": ("even", 2, "balance must be 'auto' or a list of integers, got 'even'"),
    "entries": ([1, 1, 2], 2, "balance [1, 1, 2] has 3 entries for 2 stages; give one a stage"),
    "auto": ("auto", 5, "cannot split 4 layers into 5 stages; give at most as many stages as layers"),
}


@pytest.mark.parametrize(("balance", "stages", "message"), BAD_BALANCES.values(), ids=BAD_BALANCES.keys())
def test_balances_that_do_not_fit(balance: Any, stages: int, message: str) -> None:
    with pytest.raises(BalanceError) as raised:
        split(model(), balance, stages)
    assert str(raised.value) == message


# Placing


def layers_of(stage: Stage) -> nn.Sequential:
    assert isinstance(stage.module, SequentialStage)
    return stage.module.layers


# Ties


def tied() -> nn.Sequential:
    whole = model(3)
    whole[2].weight = whole[0].weight
    return whole


def test_a_parameter_tied_over_devices_has_one_owner_and_a_replica() -> None:
    """Also on one physical device, where two threads would otherwise add to the same gradient at once."""
    whole = tied()
    keys = list(whole.state_dict())
    stages, ties = place(in_stages(whole, [1, 1, 1]), [0, 1, 2], resolve_devices(["cpu:0"] * 3))
    assert ties.links == ((0, 2),)
    (replica,) = ties.between(0, 2)
    mine = layers_of(stages[2])[0].weight
    assert mine is replica.tensor
    assert replica.owner is whole[0].weight is whole[2].weight
    assert mine is not whole[0].weight
    assert mine.data_ptr() == whole[0].weight.data_ptr(), "between CPU devices it shares the memory"
    assert layers_of(stages[2])[0].bias is whole[2].bias
    assert list(whole.state_dict()) == keys
    assert len(list(whole.parameters())) == 5


def test_a_shared_buffer_is_replicated() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

    scale = torch.ones(2)
    whole = nn.Sequential(Scaled(scale), Scaled(scale))
    stages, ties = place(in_stages(whole, [1, 1]), [0, 1], [Device("cpu", CPU), Device("meta", META)])
    (replica,) = ties.between(0, 1)
    assert not replica.tensor.requires_grad
    assert layers_of(stages[1])[0].scale.device == META
    assert whole[1].scale is whole[0].scale is scale


def test_running_statistics_shared_over_devices_are_refused_before_anything_moves() -> None:
    layer = nn.BatchNorm1d(2)
    staged = in_stages(nn.Sequential(layer, nn.ReLU(), layer), [1, 1, 1])
    with pytest.raises(SharedParameterError) as raised:
        place(staged, [1, 0, 0], [Device("cpu", CPU), Device("meta", META)])
    assert str(raised.value) == (
        "stage 0 and stage 2, on different devices, both update the running statistics of one BatchNorm1d; give each "
        "a layer of its own, or split where one stage has both"
    )
    assert layer.weight.device == CPU


# Calls of a step


@pytest.mark.parametrize("index", [0, 1])
def test_the_function_of_a_stage_calls_its_layers_and_all_hooks(index: int) -> None:
    whole = model()
    stage = in_stages(whole, [2, 2]).stages[index]
    received = {CALLER: Arguments.of(torch.ones(1, 2))} if index == 0 else {0: torch.ones(1, 2)}
    (wanted,) = stage(received).values()
    (found,) = stage.function()(received).values()
    assert torch.equal(found, wanted)
    seen: list[nn.Module] = []
    register_everywhere = torch.nn.modules.module.register_module_forward_hook
    for module in (stage, stage.layers, stage.layers[0]):
        for register, called in (
            (module.register_forward_hook, {module}),
            (register_everywhere, {stage, stage.layers}),
        ):
            handle = register(lambda module, *_: seen.append(module))
            try:
                stage.function()(received)
            finally:
                handle.remove()
            assert called <= set(seen)
            seen.clear()
