"""The U-Net example: the paper's model, the same with and without skips, and pictures whose masks are right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from asyncpipe.errors import JobFileError, OptionError
from asyncpipe.ops.model.skip_layout import skip_layout
from asyncpipe.train.entry import find_entry
from asyncpipe.train.job_file import load_job
from asyncpipe.train.progress import ProgressSink, StepProgress
from asyncpipe.train.training_run import TrainingRun

UNET = Path(__file__).parents[2] / "examples" / "unet"


@pytest.fixture(scope="module")
def unet() -> Iterator[ModuleType]:
    sys.path.insert(0, str(UNET))
    try:
        import unet

        # Job files find the same module again.
        yield unet
    finally:
        sys.path.remove(str(UNET))
        sys.modules.pop("unet", None)


# The model


@pytest.mark.parametrize(
    ("num_convs", "base_channels", "millions"),
    [(6, 72, 362.2), (11, 128, 2210), (24, 128, 4990), (24, 160, 7800), (48, 160, 15820)],
)
def test_there_are_as_many_parameters_as_the_paper_counts(unet, num_convs, base_channels, millions):
    with torch.device("meta"):
        model = unet.unet(5, num_convs, base_channels)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)


def test_skips_join_the_same_level_of_both_ways(unet):
    model = unet.unet(depth=3, num_convs=1, base_channels=4)
    stages = [[layer] for layer in model]
    ends = [*skip_layout(stages).values()]
    assert ends == [(1, 17), (4, 14), (7, 11)]
    with torch.no_grad():
        outputs = [torch.zeros(1, 3, 16, 16)]
        for layer in model:
            outputs.append(layer(outputs[-1]))
    for source, target in ends:
        assert outputs[source].shape == outputs[target].shape  # What goes into both ends of a skip.
        assert outputs[target + 1].shape[1] == 2 * outputs[target].shape[1]


def run(model: torch.nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients on one batch."""
    x = torch.randn(2, 3, 16, 16, generator=Generator().manual_seed(1), requires_grad=True)
    output = model(x)
    output.square().sum().backward()
    return output, [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("norm", [True, False])
def test_without_portals_outputs_and_gradients_are_the_same_to_the_bit(unet, norm):
    torch.manual_seed(0)
    with_portals = unet.unet(3, 2, 4, norm=norm)
    without = unet.unet(3, 2, 4, norm=norm, portals=False)
    without.load_state_dict(with_portals.state_dict())
    (output, gradients), (other_output, other_gradients) = run(with_portals), run(without)
    assert torch.equal(output, other_output)
    assert len(gradients) == len(other_gradients) == 1 + len(list(with_portals.parameters()))
    for gradient, other in zip(gradients, other_gradients, strict=True):
        assert torch.equal(gradient, other)
    assert gradients[0].any()


# The pictures


def test_without_scikit_learn_one_is_told_what_to_install(unet, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OptionError, match="pip install scikit-learn"):
        unet.build()
    job = load_job(UNET / "unet.toml")
    with pytest.raises(JobFileError, match=r"unet\.toml: job\.parameters: .*pip install scikit-learn"):
        find_entry(job)()


# As a job


class Losses(ProgressSink):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.of: list[float] = []

    def stepped(self, progress: StepProgress) -> None:
        self.of.append(progress.loss)


async def train(**parameters: Any) -> tuple[list[float], str | None]:
    """The example's job, made small; losses and sample."""
    job = load_job(UNET / "unet.toml")
    small = {"depth": 2, "num_convs": 1, "base_channels": 4, "canvas": 20, "noise": 0.1, **parameters}
    job = job.override("job", parameters=small).override("training", steps=40, batch_size=8, learning_rate=0.01)
    job = job.model_copy(update={"observe": type(job.observe)()})
    losses = Losses()
    summary = await TrainingRun(job, find_entry(job), progress=losses).run()
    return losses.of, summary.sample


@pytest.mark.usefixtures("unet")
async def test_the_job_learns_and_shows_it_and_without_portals_the_same_to_the_bit():
    losses, sample = await train()
    assert await train(portals=False) == (losses, sample)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert sample is not None
    assert sample.startswith("IoU 0.")
