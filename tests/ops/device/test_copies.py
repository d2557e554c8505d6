"""Copies between lanes: none on one device, else through pinned memory and after the right streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncpipe.ops.device.copies import Copier, to_device
from asyncpipe.ops.device.streams import AcceleratorStream, CpuStream

CPU = torch.device("cpu")


# On a GPU


def cuda() -> torch.device:
    return torch.device("cuda", 0)


def produced(stream: AcceleratorStream, value: float) -> tuple[Tensor, torch.cuda.Event]:
    """A tensor that ``stream`` is still busy writing, and the event behind it."""
    with stream.use():
        tensor = torch.zeros(1 << 20, device=cuda())
        torch.cuda._sleep(50_000_000)
        tensor += value
        event = torch.cuda.Event()
        event.record(stream.stream)
    return tensor, event


@pytest.mark.cuda
def test_gpu_to_cpu_is_pinned_and_over_when_its_side_stream_is() -> None:
    producer, lane = AcceleratorStream(cuda()), CpuStream()
    copier = Copier(lane, CpuStream())
    tensor, event = produced(producer, 7.0)
    side = copier.side([None, tensor])
    assert side is not None
    assert side.device == cuda()
    assert side is copier.side([tensor]), "one side stream a source"
    assert side.stream != producer.stream
    side.wait(event)
    missing, moved = copier.copy([None, tensor], side)
    del tensor  # Its memory may be reused only behind the copy.
    with producer.use():
        torch.full((1 << 20,), 99.0, device=cuda())
    over = torch.cuda.Event()
    over.record(side.stream)
    lane.wait(over)
    assert missing is None
    assert moved is not None
    assert moved.device == CPU
    assert moved.is_pinned()
    assert bool((moved == 7).all())


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
def test_cpu_to_gpu(pinned: bool) -> None:
    lane, compute = AcceleratorStream(cuda()), AcceleratorStream(cuda())
    copier = Copier(lane, compute)
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    source = tensor.pin_memory() if pinned else tensor
    assert copier.side([source]) is None
    with lane.use():
        (moved,) = copier.copy([source], None)
        event = torch.cuda.Event()
        event.record(lane.stream)
    assert moved is not None
    assert moved.device == cuda()
    compute.wait(event)
    with compute.use():
        doubled = moved * 2
    compute.stream.synchronize()
    assert torch.equal(doubled.cpu(), tensor * 2)


@pytest.mark.cuda
def test_there_and_back_keeps_every_kind_of_tensor() -> None:
    for tensor in (torch.arange(5), torch.randn(3, 4).t(), torch.tensor(2.0), torch.zeros(0, 3)):
        back = to_device(to_device(tensor, cuda()), CPU)
        torch.cuda.synchronize()
        assert torch.equal(back, tensor)
