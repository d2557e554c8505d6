"""What this process has of its physical devices at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.ops.device.lent_streams import lent_streams
from asyncpipe.ops.device.memory import device_memory

__all__ = ["note_devices"]


def note_devices(devices: Mapping[str, torch.device], notes: StepNotes) -> None:
    """Add memory and streams of the physical ``devices``, by the names that the caller has, to a step's ``notes``."""
    notes.memory = {name: device_memory(device) for name, device in devices.items()}
    notes.streams = {name: lent_streams(device) for name, device in devices.items()}
