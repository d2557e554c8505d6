"""What this process has of its physical devices at the end of a step."""

from __future__ import annotations

from collections.abc import Collection

import torch

from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.ops.device.lent_streams import lent_streams
from asyncpipe.ops.device.memory import device_memory

__all__ = ["note_devices"]


def note_devices(devices: Collection[torch.device], notes: StepNotes) -> None:
    """Add memory and streams of the physical ``devices`` to the ``notes`` of a step."""
    notes.memory = {str(device): device_memory(device) for device in devices}
    notes.streams = {str(device): lent_streams(device) for device in devices}
