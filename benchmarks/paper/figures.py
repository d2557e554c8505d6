"""The figures of the torchgpipe paper (Kim et al. 2020, arXiv 2004.09910), with the settings that they belong to.

They are taken from what the authors publish beside their code, with the programs that measured them on Tesla P40 GPUs:
https://github.com/kakaobrain/torchgpipe, folders ``unet-timeline``, ``amoebanetd-speed`` and ``unet-speed`` of
``benchmarks``, each with a README (figures) and a ``main.py`` (batch, micro-batches, recomputation, n and m). Speed-ups
are computed from the throughputs. ``None`` stands for what the authors did not measure: not stated.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ABLATION",
    "AMOEBANET",
    "AMOEBANET_SPEED",
    "BARE_UNET",
    "SEQUENTIAL_AMOEBANET",
    "UNET",
    "UNET_SPEED",
    "WHOLE",
    "AblationArm",
    "Setting",
]

UNET, AMOEBANET = "U-Net (5, 64)", "AmoebaNet-D (18, 256)"
BARE_UNET = 28.500
"""Samples per second of U-Net (5, 64) on one GPU, without pipeline and recomputation: speed-ups are over this."""

SEQUENTIAL_AMOEBANET = 26.733
"""Samples per second of AmoebaNet-D (18, 256) with n=2, m=1, where nothing overlaps: speed-ups are over this."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of a table of speeds."""

    name: str
    devices: int
    microbatches: int
    batch: int
    checkpoint: str
    paper: float
    """Samples per second."""


@dataclass(frozen=True, slots=True)
class AblationArm:
    """A row of the ablation: what is there, and what the authors measured with it."""

    name: str
    dependency: bool
    streams: bool
    portals: bool
    paper: float | None = None
    """Samples per second."""
    utilization: float | None = None
    """Of the GPUs, as a mean."""


WHOLE = Setting("dependency, streams, portals", 4, 8, 128, "except_last", 58.477)
ABLATION = (
    AblationArm(WHOLE.name, True, True, True, WHOLE.paper, 0.75),
    AblationArm("without portals", True, True, False, 55.191, 0.71),
    AblationArm("without streams", True, False, True),
    AblationArm("without dependency", False, True, True),
    AblationArm("dependency alone", True, False, False, 41.306, 0.59),
    AblationArm("none of them", False, False, False, 30.662, 0.44),
)
"""Table 1 adds one after the other, from the last row up; taking out streams or dependency alone is not in it."""

AMOEBANET_SPEED = (
    Setting("n=2, m=1", 2, 1, 96, "always", SEQUENTIAL_AMOEBANET),
    Setting("n=2, m=4", 2, 4, 256, "except_last", 41.133),
    Setting("n=2, m=32", 2, 32, 1280, "except_last", 47.386),
    Setting("n=4, m=1", 4, 1, 160, "always", 26.827),
    Setting("n=4, m=4", 4, 4, 360, "except_last", 44.543),
    Setting("n=4, m=32", 4, 32, 1152, "except_last", 72.412),
    Setting("n=8, m=1", 8, 1, 196, "always", 24.918),
    Setting("n=8, m=4", 8, 4, 480, "except_last", 70.065),
    Setting("n=8, m=32", 8, 32, 1280, "except_last", 132.413),
)

UNET_SPEED = (
    Setting("pipeline-1", 1, 2, 80, "except_last", 24.456),
    Setting("pipeline-2", 2, 32, 512, "except_last", 35.502),
    Setting("pipeline-4", 4, 16, 512, "except_last", 67.042),
    Setting("pipeline-8", 8, 40, 640, "except_last", 88.497),
)
