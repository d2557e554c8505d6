"""Names of tasks for profilers, and samples of memory for traces.

``torch.profiler`` records only the thread that starts it, but tasks run on the threads of their devices. To see them::

    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profiler: ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.errors import OptionError
from asyncpipe.ops.device.memory import allocated_bytes
from asyncpipe.ops.torch_internals import record_function

__all__ = ["Instruments"]


@dataclass(frozen=True, slots=True)
class Instruments:
    """What is recorded around each task, on the thread of its device.

    Raises ``OptionError`` for an instrument that this build of torch lacks.
    """

    nvtx: bool = False
    """Whether each task is an NVTX range, for Nsight Systems."""
    sample_memory: bool = False
    """Whether the memory of its device is read after each task: some 12 µs on a CPU, 100 µs on CUDA."""

    def __post_init__(self) -> None:
        if self.nvtx:
            try:
                torch.cuda.nvtx.mark("asyncpipe")  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise OptionError(
                    "nvtx=True needs a torch that was built with CUDA, and this one was not; leave it out "
                    "(torch.profiler sees the names of tasks anyway)"
                ) from error

    def named(self, name: str) -> AbstractContextManager[object]:
        """A context that ``torch.profiler`` and, with ``nvtx``, Nsight Systems show as ``name``."""
        return _nvtx_range(name) if self.nvtx else record_function(name)

    def sample(self, device: torch.device, notes: StepNotes) -> None:
        """With ``sample_memory``: note the bytes allocated on ``device`` now.

        On an accelerator the host is ahead of the device, so the task may not have run yet.
        """
        if self.sample_memory:
            notes.samples.append((time.perf_counter(), str(device), allocated_bytes(device)))


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
