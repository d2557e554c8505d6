"""Which CUDA streams lanes get from a fake device, which returns them in turn as torch does."""

from __future__ import annotations

import gc
from itertools import cycle

import pytest
import torch

from asyncpipe.ops.device import streams as stream
from asyncpipe.ops.device.streams import AcceleratorStream

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def of_torch(monkeypatch):
    """Handles of 32 streams of each device, round robin."""
    handles = {device: cycle([(device, number) for number in range(32)]) for device in (DEVICE, OTHER)}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(handles[device]))
    monkeypatch.setattr(stream, "_DeviceClock", lambda _: None)
    # Private: the pool of unused streams belongs to the process, and other tests must not see these handles.
    monkeypatch.setattr(stream, "_unused", type(stream._unused)(list))


def test_no_two_pipelines_share_a_stream():
    lasting = [AcceleratorStream(DEVICE) for _ in range(3)]
    for _ in range(40):
        passing = [AcceleratorStream(device) for device in (DEVICE, OTHER) for _ in range(6)]
        streams = [lane.stream for lane in [*lasting, *passing]]
        assert len(set(streams)) == 15
        assert all(lane.stream[0] == lane.device for lane in passing)
        del passing
        gc.collect()


def test_streams_that_are_given_back_are_lent_again():
    first = AcceleratorStream(DEVICE)
    handle = first.stream
    assert AcceleratorStream(DEVICE).stream != handle
    del first
    gc.collect()
    assert handle in {lane.stream for lane in [AcceleratorStream(DEVICE) for _ in range(2)]}
