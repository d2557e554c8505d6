"""The U-Nets of the torchgpipe paper on one device: the cost of a pipeline there, and the memory that it saves.

Both experiments are those of Kim et al. 2020 (arXiv 2004.09910), pipeline-1 against the bare model, with the layers
that the authors measured (``model.py``): convolution, dropout of channels, instance norm, leaky ReLU.

Speed (``speed.py``): U-Net (5, 64); the bare model takes batches of 40 pictures, the pipeline batches of 80 in two
micro-batches, and pictures per second are compared. Recomputation bounds the ratio: if a forward is a third of a step,
recomputing all forwards bounds it by 3/4, those of one micro-batch of two by 6/7 (0.858 in the paper), none by 1.

Memory (``memory.py``): the peak of the bare U-Net (6, 72) with 32 pictures is the limit. The largest U-Net that trains
on as many pictures within it, in 32 micro-batches, is searched. The paper has (11, 128), 6.1 times the parameters.

A CUDA device measures both at the paper's size. A CPU uses fewer pixels and channels, in such proportion that the ratio
of activations to parameters is the paper's, and bytes are counted. On a CPU the paper's size can only be counted, with
tensors that have no values; timing it would take hours.
"""

from __future__ import annotations

from asyncpipe.bench import Figures, Progress
from asyncpipe.core.checks import check_choice
from asyncpipe.ops.device.devices import resolve_devices
from benchmarks.unet import memory, speed

__all__ = ["run", "show"]

SIZES = ("small", "paper")


def run(
    progress: Progress,
    *,
    device: str | None = None,
    size: str | None = None,
    speed_size: speed.UNetSpeedSize | None = None,
    memory_size: memory.UNetMemorySize | None = None,
) -> Figures:
    """Both experiments on ``device`` (default: a CPU) at ``size`` (default: small on a CPU, paper on a CUDA device).

    ``speed_size`` and ``memory_size`` replace the sizes that ``size`` names. Raises ``DeviceError`` for a device that
    is not there, and ``OptionError`` for an unknown size or if the example with the model is not there.
    """
    target = resolve_devices([device or "cpu:0"])[0]
    size = size or ("paper" if target.is_accelerator else "small")
    check_choice("size", size, SIZES)
    timed = target.is_accelerator or size == "small"
    return {
        "device": target.name,
        "size": size,
        "speed": speed.run(progress, target, speed_size or speed.SIZES[size]) if timed else None,
        "memory": memory.run(progress, target, memory_size or memory.SIZES[size], values=timed),
    }


def show(figures: Figures) -> str:
    """Both tables."""
    timed = figures["speed"]
    head = f"U-Nets on {figures['device']}, size {figures['size']}"
    above = "speed is not measured: on a CPU it would take hours" if timed is None else speed.show(timed)
    return f"{head}\n\n{above}\n\n{memory.show(figures['memory'])}"
