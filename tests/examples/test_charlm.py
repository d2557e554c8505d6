"""The example's text and model: what its loss means depends on them."""

from __future__ import annotations
import __future__

import sys
from math import log
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Generator

CHARLM = Path(__file__).parents[2] / "examples" / "charlm"


@pytest.fixture(scope="module")
def charlm() -> ModuleType:
    sys.path.insert(0, str(CHARLM))
    try:
        import charlm
    finally:
        sys.path.remove(str(CHARLM))
        sys.modules.pop("charlm", None)
    return charlm


def test_encoding_keeps_what_is_printable_and_marks_the_rest(charlm):
    text = "def f(x):\n\treturn 'ä → ~'\r\n"
    encoded = torch.frombuffer(bytearray(charlm.encode(text.encode())), dtype=torch.uint8)
    assert charlm.decode(encoded) == "def f(x):\n?return '? ? ~'\n".replace("?", charlm.OTHER)


def test_the_alphabet_makes_ignorance_expensive(charlm):
    assert len(charlm.ALPHABET) == len(set(charlm.ALPHABET)) == 97
    workload = charlm.build(width=16, heads=2, max_bytes=50_000)
    x, target = next(workload.batches(8, Generator().manual_seed(0)))
    assert workload.loss_fn(workload.model(x), target).item() == pytest.approx(log(97), abs=0.2)


def test_the_text_is_the_standard_library_without_its_tests(charlm):
    text = charlm.read_standard_library()
    assert 5_000_000 < len(text) < 30_000_000
    assert int(text.max()) < 97
    first = Path(__future__.__file__).read_text(encoding="utf-8")
    assert charlm.decode(text[: len(first)]) == first


def test_targets_are_the_next_characters_and_held_out_text_is_never_trained_on(charlm):
    workload = charlm.build(width=16, heads=2, context=32, max_bytes=20_000)
    text = charlm.read_standard_library(20_000)
    x, target = next(workload.batches(64, Generator().manual_seed(0)))
    assert x.shape == target.shape == (64, 32)
    assert torch.equal(x[:, 1:], target[:, :-1])
    training, held_out = charlm.decode(text[:19_000]), charlm.decode(text[19_000:])
    windows = [(charlm.decode(a) + charlm.decode(b[-1:])) for a, b in zip(x, target, strict=True)]
    assert all(window in training for window in windows)
    for x, target in workload.held_out(4):
        assert all(charlm.decode(a) in held_out for a in (*x, *target))


def test_the_model_sees_no_future(charlm):
    model = charlm.build(width=16, heads=2, context=12, max_bytes=5_000).model.eval()
    x = torch.randint(97, (1, 12), generator=Generator().manual_seed(0))
    other = x.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 97
    before, after = model(x), model(other)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


async def test_generation_continues_the_prompt_within_the_context(charlm):
    lengths = []

    async def forward(x: torch.Tensor) -> torch.Tensor:
        lengths.append(x.shape)
        logits = torch.zeros(1, x.shape[1], 97)
        logits[..., charlm.ALPHABET.index("a")] = 100.0
        return logits

    assert await charlm.generate(forward, "def ", 5, context=6) == "def aaaaa"
    assert lengths == [(1, 4), (1, 5), (1, 6), (1, 6), (1, 6)]
