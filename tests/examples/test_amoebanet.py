"""The AmoebaNet-D example: the papers' model, pairs from cell to cell, and digits as a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Generator, Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.train.entry import find_entry
from asyncpipe.train.job_file import load_job
from asyncpipe.train.progress import ProgressSink, StepProgress
from asyncpipe.train.training_run import TrainingRun

AMOEBANET = Path(__file__).parents[2] / "examples" / "amoebanet"


@pytest.fixture(scope="module")
def amoebanet() -> Iterator[ModuleType]:
    sys.path.insert(0, str(AMOEBANET))
    try:
        import amoebanet

        # Job files find the same module again.
        yield amoebanet
    finally:
        sys.path.remove(str(AMOEBANET))
        sys.modules.pop("amoebanet", None)


# The model


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "millions"),
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1060), (72, 512, 1840)],
)
def test_there_are_as_many_parameters_as_the_papers_count(amoebanet, num_layers, num_filters, millions):
    with torch.device("meta"):
        model = amoebanet.amoebanetd(1000, num_layers, num_filters)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("stem_reductions", [0, 1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (37, 50)])
def test_images_of_any_size_become_logits(amoebanet, stem_reductions, height, width):
    model = amoebanet.amoebanetd(7, 3, 16, input_channels=2, stem_reductions=stem_reductions)
    assert model(torch.randn(2, 2, height, width)).shape == (2, 7)


def test_a_cell_makes_the_next_pair_of_its_output_and_the_newest_input(amoebanet):
    model = amoebanet.amoebanetd(10, 3, 16, input_channels=1, stem_reductions=1)
    values = [torch.randn(2, 1, 32, 32)]
    for layer in model:
        values.append(layer(values[-1]))
    pairs = values[1:-1]
    assert all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    assert all(after[1] is before[0] for before, after in pairwise(pairs))
    # Stem, its reduction, and the normal cells with the other two reductions between them.
    assert [tuple(newest.shape[1:]) for newest, _ in pairs] == [
        (8, 16, 16),
        (3 * 16, 8, 8),
        (4 * 16, 8, 8),
        (3 * 32, 4, 4),
        (4 * 32, 4, 4),
        (3 * 64, 2, 2),
        (4 * 64, 2, 2),
    ]


def test_normal_cells_are_as_many_as_wanted(amoebanet):
    cells = [layer for layer in amoebanet.amoebanetd(10, 9, 8) if isinstance(layer, amoebanet.Cell)]
    wanted = "RR NNN R NNN R NNN".replace(" ", "")
    assert "".join("R" if cell.kind.reduces else "N" for cell in cells) == wanted


class Times(nn.Module):
    """An operation that one can count with."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize(("kind", "joined"), [("NORMAL", [1, 16, 11, 1836]), ("REDUCTION", [33, 207, 277])])
def test_a_cell_is_wired_as_evolution_found(amoebanet, kind, joined):
    cell = amoebanet.Cell(getattr(amoebanet, kind), 4, 4, 4, False)
    cell.fit_newest = cell.fit_previous = nn.Identity()
    for position in range(10):
        cell.operations[position] = Times(position + 1)
    newest, previous = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 4.0)
    output, passed = cell((newest, previous))
    assert passed is newest
    assert output.flatten().tolist() == joined


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", ["conv_1x1", "conv_3x3", "conv_1x7_7x1", "max_pool_3x3", "avg_pool_3x3", "none"])
def test_an_operation_keeps_channels_and_divides_the_size(amoebanet, name, stride):
    operation = getattr(amoebanet, name)(8, stride)
    assert operation(torch.randn(2, 8, 6, 9)).shape == (2, 8, -(-6 // stride), -(-9 // stride))


def test_what_halves_the_size_sees_two_pixels_of_four(amoebanet):
    x = torch.rand(1, 2, 6, 6, requires_grad=True)
    amoebanet.Halve(2, 4).eval()(x).sum().backward()
    seen = x.grad.ne(0).all(dim=1)[0]
    even, odd = torch.arange(6) % 2 == 0, torch.arange(6) % 2 == 1
    assert torch.equal(seen, even[:, None] & even | odd[:, None] & odd)


def test_every_parameter_has_a_part_in_the_output(amoebanet):
    model = amoebanet.amoebanetd(10, 3, 8, input_channels=1, stem_reductions=1)
    model(torch.randn(4, 1, 32, 32)).square().sum().backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 4}, "num_layers must be a positive multiple of 3, got 4"),
        ({"num_layers": 0}, "num_layers must be a positive multiple of 3, got 0"),
        ({"num_filters": 12}, "num_filters must be a positive multiple of 8, got 12"),
        ({"num_filters": 6, "stem_reductions": 0}, "num_filters must be a positive multiple of 4, got 6"),
        ({"stem_reductions": -1}, "stem_reductions must be at least 0, got -1"),
    ],
)
def test_sizes_that_cannot_be_divided_are_turned_down(amoebanet, sizes, message):
    with pytest.raises(OptionError, match=message):
        amoebanet.amoebanetd(**sizes)


# The images


def test_batches_are_the_generators_and_images_keep_their_labels(amoebanet):
    labels = torch.arange(10)
    images = (labels / 10)[:, None, None].expand(10, 8, 8)
    digits = amoebanet.Digits(images, labels, size=20, noise=0.01)
    one, same, other = (list(islice(digits.batches(6, Generator().manual_seed(seed)), 2)) for seed in (1, 1, 2))
    for (x, target), (same_x, same_target), (other_x, _) in zip(one, same, other, strict=True):
        assert x.shape == (6, 1, 20, 20)
        assert torch.equal(x.mean(dim=(1, 2, 3)).mul(10).round().long(), target)
        assert torch.equal(x, same_x)
        assert torch.equal(target, same_target)
        assert not torch.equal(x, other_x)
    held_out = digits.all(4)
    assert [len(x) for x, _ in held_out] == [4, 4, 2]
    assert torch.cat([target for _, target in held_out]).tolist() == labels.tolist()
    assert all(torch.equal(x, again) for (x, _), (again, _) in zip(held_out, digits.all(4), strict=True))


def test_held_out_digits_are_others_than_those_trained_on(amoebanet):
    (images, labels), (held_out_images, held_out_labels) = amoebanet.split_digits()
    assert len(images) == len(labels) == 1437
    assert len(held_out_images) == len(held_out_labels) == 360
    seen = {tuple(image.flatten().tolist()) for image in images}
    assert all(tuple(image.flatten().tolist()) not in seen for image in held_out_images)


def test_without_scikit_learn_one_is_told_what_to_install(amoebanet, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OptionError, match="pip install scikit-learn"):
        amoebanet.build()


def test_digits_are_not_made_smaller(amoebanet):
    with pytest.raises(OptionError, match="size must be at least 8, got 7"):
        amoebanet.build(size=7)


async def test_the_sample_counts_what_is_told_right_and_shows_some(amoebanet):
    images = torch.zeros(3, 1, 8, 8)
    images[:, :, 2:4, 1:3] = 1
    guesses = iter(torch.tensor([[4, 7], [7, 0]]))

    async def forward(x: Tensor) -> Tensor:
        return torch.eye(10)[next(guesses)][: len(x)]

    batches = [(images[:2], torch.tensor([4, 7])), (images[2:], torch.tensor([1]))]
    assert (await amoebanet.describe(forward, batches, shown=2)).split("\n") == [
        "2 of 3 digits that it has not seen told right, 66.7%",
        "4 taken for 4     7 taken for 7",
        *[""] * 2,
        *["  @@@@              @@@@"] * 2,
        *[""] * 4,
    ]


# As a job


class Losses(ProgressSink):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.of: list[float] = []

    def stepped(self, progress: StepProgress) -> None:
        self.of.append(progress.loss)


@pytest.mark.usefixtures("amoebanet")
async def test_the_job_learns_and_shows_it():
    job = load_job(AMOEBANET / "amoebanet.toml")
    parameters = {"num_layers": 3, "num_filters": 8, "stem_reductions": 0, "size": 16, "noise": 0.1}
    job = job.override("job", parameters=parameters).override("training", steps=20, batch_size=32, warmup_steps=3)
    job = job.model_copy(update={"observe": type(job.observe)()})
    losses = Losses()
    summary = await TrainingRun(job, find_entry(job), progress=losses).run()
    assert len(losses.of) == 20
    assert sum(losses.of[-5:]) < 0.8 * sum(losses.of[:5])
    assert summary.evaluation is not None
    assert summary.sample is not None
    assert " of 360 digits that it has not seen told right" in summary.sample
