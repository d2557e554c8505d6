"""The U-Net example: the paper's model, the same with and without skips, and pictures whose masks are right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
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
EVEN = (0, 2, 4, 6, 8)


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


@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize(("depth", "num_convs", "norm"), [(1, 1, True), (2, 1, False), (3, 2, True)])
def test_the_output_has_the_size_of_the_input(unet, depth, num_convs, norm, portals):
    model = unet.unet(depth, num_convs, 4, input_channels=2, output_channels=3, norm=norm, portals=portals)
    assert model(torch.randn(2, 2, 16, 24)).shape == (2, 3, 16, 24)


def test_a_layer_is_one_convolution_a_pool_an_upsampling_or_an_end_of_a_skip(unet):
    layers = [type(layer).__name__ for layer in unet.unet(depth=2, num_convs=2, base_channels=4)]
    down, up = ["Sequential"] * 2 + ["Keep", "MaxPool2d"], ["Upsample", "Join"] + ["Sequential"] * 2
    assert layers == down * 2 + ["Sequential"] * 2 + up * 2 + ["Conv2d"]


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


def test_without_portals_what_is_kept_passes_through_every_layer_in_between(unet):
    value: Any = torch.zeros(1, 3, 8, 8)
    tensors = []
    for layer in unet.unet(depth=2, num_convs=1, base_channels=4, portals=False):
        value = layer(value)
        tensors.append(len(value) if isinstance(value, tuple) else 1)
    assert tensors == [1, 2, 2, 2, 3, 3, 3, 3, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"num_convs": 0}, "num_convs must be at least 1, got 0"),
        ({"base_channels": 3}, "base_channels must be even"),
    ],
)
def test_sizes_that_are_not_there_are_turned_down(unet, sizes, message):
    with pytest.raises(OptionError, match=message):
        unet.unet(**sizes)


# The pictures


def plain_digits() -> tuple[Tensor, Tensor]:
    """A digit of each class, all its pixels as bright as nothing else is."""
    labels = torch.arange(10)
    return (0.3 + 0.05 * labels)[:, None, None].expand(10, 8, 8), labels


def test_the_same_seed_draws_the_same_pictures(unet):
    mosaics = unet.Mosaics(*plain_digits(), canvas=32, noise=0.2, marked=EVEN)
    one, same, other = (list(islice(mosaics.batches(4, Generator().manual_seed(seed)), 2)) for seed in (1, 1, 2))
    for (x, mask), (same_x, same_mask), (other_x, _) in zip(one, same, other, strict=True):
        assert x.shape == mask.shape == (4, 1, 32, 32)
        assert torch.equal(x, same_x)
        assert torch.equal(mask, same_mask)
        assert not torch.equal(x, other_x)
    assert not torch.equal(one[0][0], one[1][0])


def test_a_mask_is_the_pixels_of_whole_digits_of_the_marked_classes(unet):
    x, mask = unet.Mosaics(*plain_digits(), canvas=32, noise=0.0, marked=EVEN).draw(200, Generator().manual_seed(0))
    wanted = torch.zeros_like(x)
    for label in range(10):
        pixels = torch.isclose(x, torch.tensor(0.3 + 0.05 * label))
        assert pixels.sum() > 0
        assert pixels.sum() % 64 == 0
        wanted[pixels] = float(label in EVEN)
    assert torch.equal(mask, wanted)


def test_digits_stand_in_their_places_whole_and_upright(unet):
    image = torch.linspace(0.3, 1, 64).view(1, 8, 8)
    x, _ = unet.Mosaics(image, torch.zeros(1, dtype=torch.long), canvas=10, noise=0.0, marked=EVEN).draw(
        60, Generator().manual_seed(0)
    )
    corners = {}
    for picture in x[:, 0]:
        if picture.any():
            row, column = (int(at) for at in picture.nonzero()[0])
            assert torch.equal(picture[row : row + 8, column : column + 8], image[0])
            assert picture.count_nonzero() == 64
            corners[row, column] = True
    assert corners.keys() == {(row, column) for row in range(3) for column in range(3)}


def test_pixels_without_ink_belong_to_no_digit(unet):
    faint = torch.full((1, 8, 8), 0.2)
    faint[0, 3, 3] = 0.9
    mosaics = unet.Mosaics(faint, torch.zeros(1, dtype=torch.long), canvas=16, noise=0.0, marked=EVEN)
    x, mask = mosaics.draw(20, Generator().manual_seed(0))
    assert torch.equal(mask, (x > 0.5).float())
    assert mask.any()


def test_held_out_digits_are_others_than_those_trained_on(unet):
    (images, labels), (held_out_images, held_out_labels) = unet.split_digits()
    assert len(images) + len(held_out_images) == 1797
    assert len(held_out_images) == len(held_out_labels) == 360
    assert labels.unique().tolist() == held_out_labels.unique().tolist() == list(range(10))
    assert (images.min(), images.max()) == (0, 1)
    seen = {tuple(image.flatten().tolist()) for image in images}
    assert all(tuple(image.flatten().tolist()) not in seen for image in held_out_images)


def test_without_scikit_learn_one_is_told_what_to_install(unet, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OptionError, match="pip install scikit-learn"):
        unet.build()
    job = load_job(UNET / "unet.toml")
    with pytest.raises(JobFileError, match=r"unet\.toml: job\.parameters: .*pip install scikit-learn"):
        find_entry(job)()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"canvas": 36}, r"canvas must be a multiple of 2\*\*depth = 8 and at least 10, got 36"),
        ({"canvas": 8}, "at least 10, got 8"),
        ({"marked": [0, 10]}, "marked must be a list of different digits from 0 to 9"),
        ({"marked": []}, "marked must be"),
        ({"marked": [1, 1]}, "marked must be"),
    ],
)
def test_parameters_that_fit_no_picture_are_turned_down(unet, parameters, message):
    with pytest.raises(OptionError, match=message):
        unet.build(**parameters)


# What it has learned


@pytest.mark.parametrize(
    ("predicted", "wanted", "score"),
    [([1, 1, 0, 0], [1, 0, 1, 0], 1 / 3), ([1, 0], [1, 0], 1.0), ([1, 0], [0, 1], 0.0), ([0, 0], [0, 0], 1.0)],
)
def test_intersection_over_union(unet, predicted, wanted, score):
    assert unet.intersection_over_union(torch.tensor(predicted).float(), torch.tensor(wanted).float()) == score


async def test_the_sample_draws_picture_mask_and_prediction(unet):
    mask = torch.zeros(3, 1, 4, 10)
    mask[:, :, :3, 2:5] = 1
    picture = mask * 0.5

    async def forward(x: Tensor) -> Tensor:
        assert x is picture
        return mask * 20 - 10

    assert (await unet.describe(forward, picture, mask)).splitlines() == [
        "IoU 1.000 over 3 pictures of digits it has not seen",
        "picture     wanted      predicted",
        "  ===         @@@         @@@",
        "  :::         ===         ===",
    ]


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
async def test_the_job_learns_and_shows_it():
    losses, sample = await train()
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert sample is not None
    assert sample.startswith("IoU 0.")


@pytest.mark.usefixtures("unet")
async def test_a_pipeline_without_portals_learns_the_same_to_the_bit():
    assert await train() == await train(portals=False)
