"""What the controller and a worker say to each other of a pipeline."""

from __future__ import annotations

import torch

from asyncpipe.pipeline.wire_messages import Scalars


def test_numbers_of_microbatches_travel_as_one_tensor_where_they_are_alike():
    alike = {1: torch.tensor(2.0), 0: torch.tensor(3.0, requires_grad=True)}
    sent = Scalars.of(alike)
    assert isinstance(sent.values, torch.Tensor)
    assert not sent.values.requires_grad
    assert sent.tensors() == {1: torch.tensor(2.0), 0: torch.tensor(3.0)}
    other = Scalars.of({0: torch.tensor(2.0), 1: torch.tensor([3], dtype=torch.int64)})
    assert [value.dtype for value in other.tensors().values()] == [torch.float32, torch.int64]
    assert other.tensors()[1].shape == (1,)
    assert Scalars.of({}).tensors() == {}
