"""A model as bytes for a worker: its own tensors arrive whole, those of others as shapes, and the rest as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.device.wire import from_buffers, to_buffers
from asyncpipe.ops.model.sequential import split, stage_parts
from asyncpipe.ops.model.shipping import receive_model, ship_model


class Head(nn.Module):
    """The embedding's weight once more, as the output layer."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x @ self.weight.T


def staged(layers=None, balance=(1, 2, 1)):
    torch.manual_seed(0)
    embedding = nn.Embedding(5, 4)
    layers = layers or [embedding, nn.Linear(4, 4), nn.BatchNorm1d(4), Head(embedding)]
    model = nn.Sequential(*layers)
    return stage_parts(model, split(model, list(balance), len(balance)))


@pytest.mark.parametrize(("own", "here"), [({0}, ("0.", "3.")), ({1}, ("1.", "2.")), ({2}, ())])
def test_only_the_own_tensors_have_values(own, here):
    model = staged()
    received = receive_model(ship_model(model, own)).module
    before, after = model.module.state_dict(), received.state_dict()
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.shape == before[name].shape
        assert tensor.dtype == before[name].dtype
        assert tensor.is_meta != name.startswith(here or "none")
        assert tensor.is_meta or torch.equal(tensor, before[name])
    # One parameter under two names is still one.
    assert received[0].weight is received[3].weight


def test_what_is_no_plain_tensor_arrives_as_it_was():
    layer = nn.Linear(2, 2)
    layer.weight.note = "mine"
    layer.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)
    layer.plain = torch.arange(3)
    layer.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16), persistent=False)
    (received,) = receive_model(ship_model(staged([layer], [1]), {0})).module
    assert received.weight.note == "mine"
    assert received.empty.shape == (0, 3)
    assert not received.empty.requires_grad
    assert torch.equal(received.plain, layer.plain)
    assert received.scale.dtype is torch.bfloat16
    assert "scale" not in received.state_dict()
    received.weight.data.add_(1)  # What arrives can be written to.


def test_a_recurrent_layer_still_uses_its_parameters():
    (received,) = receive_model(ship_model(staged([nn.LSTM(3, 4)], [1]), {0})).module
    assert all(a is b for a, b in zip(received._flat_weights, received.parameters(), strict=True))


def test_what_cannot_be_sent_is_refused():
    layer = nn.Linear(2, 2)
    layer.lock = threading.Lock()
    with pytest.raises(OptionError, match=r"the model cannot be sent to a worker process .*lock"):
        ship_model(staged([layer], [1]), {0})
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(OptionError, match=r"parameter '0\.weight' has a hook"):
        ship_model(staged([hooked], [1]), {0})


def test_buffers_are_the_memory_of_large_tensors_and_of_those_received():
    whole = torch.randn(4, 4096)
    pickled, *buffers = to_buffers({"pieces": whole.chunk(4), "small": torch.ones(2)}, "the batch")
    assert [buffer.raw().nbytes for buffer in buffers] == [4 * 4096] * 4
    assert len(pickled.raw()) < 4096
    # As a read-only view the first one stands for memory that is not the receiver's own. Others begin where tensors do.
    own = [torch.frombuffer(bytearray(buffer), dtype=torch.uint8).clone().numpy() for buffer in buffers[1:]]
    received = [bytes(pickled), bytes(buffers[0]), *map(memoryview, own)]
    found = from_buffers(received)
    assert torch.equal(torch.cat(found["pieces"]), whole)
    for piece in (*found["pieces"], found["small"]):
        piece.zero_()
    assert torch.equal(torch.frombuffer(received[2], dtype=torch.float32), torch.zeros(4096))
    assert received[1] == bytes(buffers[0])
