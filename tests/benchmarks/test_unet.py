"""The U-Net of the benchmarks: the paper's model, and the same with and without skips."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from asyncpipe.ops.model.skip_layout import skip_layout
from benchmarks.models.unet import unet


@pytest.mark.parametrize(
    ("num_convs", "base_channels", "millions"),
    [(6, 72, 362.2), (11, 128, 2210), (24, 128, 4990), (24, 160, 7800), (48, 160, 15820)],
)
def test_there_are_as_many_parameters_as_the_paper_counts(num_convs, base_channels, millions):
    with torch.device("meta"):
        model = unet(5, num_convs, base_channels)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)


def test_skips_join_the_same_level_of_both_ways():
    model = unet(depth=3, num_convs=1, base_channels=4)
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
def test_without_portals_outputs_and_gradients_are_the_same_to_the_bit(norm):
    torch.manual_seed(0)
    with_portals = unet(3, 2, 4, norm=norm)
    without = unet(3, 2, 4, norm=norm, portals=False)
    without.load_state_dict(with_portals.state_dict())
    (output, gradients), (other_output, other_gradients) = run(with_portals), run(without)
    assert torch.equal(output, other_output)
    assert len(gradients) == len(other_gradients) == 1 + len(list(with_portals.parameters()))
    for gradient, other in zip(gradients, other_gradients, strict=True):
        assert torch.equal(gradient, other)
    assert gradients[0].any()
