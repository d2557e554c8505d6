"""The U-Nets of the torchgpipe paper on one device: what a pipeline costs there, and how far its memory reaches.

Both experiments are those of Kim et al. 2020 (arXiv 2004.09910), pipeline-1 against the bare model, with the layers
that the authors measured: convolution, dropout of channels, instance norm, leaky ReLU.

Speed (``unet_speed.py``): U-Net (5, 64); the bare model takes batches of 40 pictures, the pipeline batches of 80 in two
micro-batches, and pictures per second are compared. What is recomputed bounds the ratio: with a forward a third of
a step, recomputing all of it makes 3/4, one micro-batch of two 6/7 (the paper has 0.858), nothing 1.

Memory (``unet_memory.py``): the bare U-Net (6, 72) at 32 pictures sets the limit; the largest U-Net is searched that
trains on as many pictures, in 32 micro-batches, within it. The paper has (11, 128), 6.1 times the parameters.

On a CUDA device both are measured at the paper's size. A CPU takes pictures and channels that are smaller, in such
proportion that activations outweigh parameters by as much as in the paper, and bytes are counted. The paper's size
can be counted on a CPU as well, by tensors without values, but not timed.
"""

from __future__ import annotations

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench import unet_memory as memory
from asyncpipe.bench import unet_speed as speed
from asyncpipe.core.checks import check_choice
from asyncpipe.ops.device.devices import resolve_devices

__all__ = ["run", "show"]

SIZES = ("small", "paper")


def run(
    progress: Progress,
    *,
    device: str | None = None,
    size: str | None = None,
    speed_size: speed.Size | None = None,
    memory_size: memory.Size | None = None,
) -> Figures:
    """Both experiments on ``device`` (by default a CPU), at a ``size`` of ``SIZES`` (by default as the device needs).

    ``speed_size`` and ``memory_size`` are measured instead of what ``size`` names. Raises ``DeviceError`` for a device
    that is not there, and ``OptionError`` for another size or where the model, an example, is not there.
    """
    target = resolve_devices([device or "cpu:0"])[0]
    size = size or ("paper" if target.is_cuda else "small")
    check_choice("size", size, SIZES)
    timed = target.is_cuda or size == "small"
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
