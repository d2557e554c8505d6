"""Which CUDA streams lanes get from a fake device, which returns them in turn as torch does."""

from __future__ import annotations

import gc
from itertools import cycle

import pytest
import torch

from asyncpipe.ops.device import lent_streams, streams
from asyncpipe.ops.device.streams import AcceleratorStream

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def of_torch(monkeypatch):
    """Handles of 32 streams of each device, round robin."""
    handles = {device: cycle([(device, number) for number in range(32)]) for device in (DEVICE, OTHER)}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(handles[device]))
    monkeypatch.setattr(streams, "clock_of", lambda device: None)  # It would wait for the device.
    # Private: the pool of unused streams belongs to the process, and other tests must not see these handles.
    monkeypatch.setattr(lent_streams, "_unused", {})
    monkeypatch.setattr(lent_streams, "_made", {})
    monkeypatch.setattr(lent_streams, "_told", set())


def test_no_two_pipelines_share_a_stream():
    lasting = [AcceleratorStream(DEVICE) for _ in range(3)]
    for _ in range(40):
        passing = [AcceleratorStream(device) for device in (DEVICE, OTHER) for _ in range(6)]
        used = [lane.stream for lane in [*lasting, *passing]]
        assert len(set(used)) == 15
        assert all(lane.stream[0] == lane.device for lane in passing)
        del passing
        gc.collect()


@pytest.mark.promise(
    "Reported, not silent", "More streams than a device has hardware queues are reported once in the log."
)
def test_streams_are_counted_and_more_than_the_hardware_queues_are_told_once(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    four = [AcceleratorStream(DEVICE) for _ in range(4)]
    assert (lent_streams.lent_streams(DEVICE), lent_streams.lent_streams(OTHER)) == (4, 0)
    assert not caplog.records
    more = [AcceleratorStream(DEVICE) for _ in range(2)]
    (told,) = caplog.records
    assert "uses 5 streams of cuda:0, which has 4 hardware queues" in told.message
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in told.message
    del four, more
    gc.collect()
    assert lent_streams.lent_streams(DEVICE) == 0
