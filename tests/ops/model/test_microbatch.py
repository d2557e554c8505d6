"""Cutting and gathering nested values, and the errors for values that cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

from asyncpipe.errors import ArgumentTypeError, BatchError, StageError
from asyncpipe.ops.model.microbatch import (
    CutBatch,
    Microbatches,
    NoChunk,
    cut,
    cut_alike,
    gather,
)


def equal(left: Any, right: Any) -> bool:
    """Whether two nested values have the same structure, tensors and other leaves."""
    (ours, spec), (theirs, other) = tree_flatten(left), tree_flatten(right)
    return spec == other and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )


def alike(batch: Any, sizes: list[int]) -> list[Any]:
    return cut_alike(batch, CutBatch([None] * len(sizes), sizes, ready_made=False))


# Sizes


@given(st.integers(1, 50), st.integers(1, 20))
@settings(max_examples=100)
def test_sizes(size: int, microbatches: int) -> None:
    sizes = cut([torch.zeros(size)], microbatches).sizes
    assert sum(sizes) == size
    assert len(sizes) == min(size, microbatches)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


# Scatter


def test_nested_values_are_cut_and_the_rest_is_repeated() -> None:
    x, mask = torch.arange(10).reshape(5, 2), torch.arange(5)
    batch = {"x": (x, "name"), "rest": [mask, None, 3, {"deep": mask.double()}]}
    first, second = cut(batch, 2).pieces
    assert equal(first, {"x": (x[:3], "name"), "rest": [mask[:3], None, 3, {"deep": mask[:3].double()}]})
    assert equal(second, {"x": (x[3:], "name"), "rest": [mask[3:], None, 3, {"deep": mask[3:].double()}]})


BAD_BATCHES = {
    "no tensor": (3, "the input holds no tensor, got int; micro-batches are cut from tensors"),
    "without dimensions": (
        {"x": torch.zeros(4), "t": (torch.tensor(1.0),)},
        "the input['t'][0] is a tensor without dimensions; dimension 0 must be the batch (NoChunk(tensor) gives it "
        "to every micro-batch whole)",
    ),
    "disagreement": (
        [torch.zeros(4), {"mask": torch.zeros(3, 4)}],
        "the tensors of the input disagree in their batch size: the input[0] has 4, the input[1]['mask'] has 3; "
        "NoChunk(tensor) gives one to every micro-batch whole",
    ),
}


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(BatchError) as raised:
        cut(batch, 2)
    assert str(raised.value) == message


def test_a_target_has_as_many_samples_as_the_input() -> None:
    with pytest.raises(BatchError) as raised:
        alike({"y": torch.zeros(5)}, [2, 2])
    assert str(raised.value) == "the target has 5 samples, but the input has 4; they must be equal"
    with pytest.raises(BatchError, match=r"the target\[0\] is a tensor without dimensions"):
        alike([torch.tensor(0.0)], [2, 2])
    with pytest.raises(BatchError, match=r"the tensors of the target disagree.*the target\[1\] has 3"):
        alike([torch.zeros(4), torch.zeros(3)], [2, 2])


# Gather


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.zeros(1), (torch.zeros(1),)],
        [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}],
        [[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]],
    ],
    ids=["tuple", "keys", "length"],
)
def test_outputs_of_mixed_structure(outputs: list[Any]) -> None:
    with pytest.raises(StageError, match="the micro-batches' outputs differ in structure; they cannot be gathered"):
        gather(outputs)


# Other ways to give micro-batches


def test_a_tensor_may_go_to_every_micro_batch_whole() -> None:
    x, mask = torch.zeros(4, 2), torch.ones(7)
    first, second = cut((x, NoChunk(mask)), 2).pieces
    assert first[1] is mask
    assert second[1] is mask
    with pytest.raises(ArgumentTypeError, match="NoChunk takes a tensor, got str"):
        NoChunk("mask")  # type: ignore[arg-type]


def test_ready_made_micro_batches_are_taken_as_they_are() -> None:
    pieces = [torch.zeros(2, 5), (torch.zeros(3, 7), NoChunk(torch.ones(9)))]
    made = cut(Microbatches(pieces), 8)
    assert (made.sizes, made.ready_made) == ([2, 3], True)
    assert made.pieces[0] is pieces[0]
    assert made.pieces[1][1].shape == (9,)
    assert cut_alike(Microbatches(["a", "b"]), made) == ["a", "b"]
    assert [len(part) for part in cut_alike(torch.zeros(5), made)] == [2, 3]
    with pytest.raises(BatchError, match="the target has 1 micro-batches, but the input has 2"):
        cut_alike(Microbatches([torch.zeros(5)]), made)
    with pytest.raises(BatchError, match="Microbatches needs at least one micro-batch, got none"):
        Microbatches([])
    with pytest.raises(BatchError, match="micro-batch 1 of the input is empty"):
        cut(Microbatches([torch.zeros(1), torch.zeros(0)]), 2).with_samples()
