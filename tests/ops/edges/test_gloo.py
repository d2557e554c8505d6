"""What is different where tensors travel by process groups."""

from __future__ import annotations

import pytest
import torch
from edge_helpers import joined, message, nothing_left
from torch import distributed

from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges.gloo import INLINE_BYTES, GlooOut


@pytest.mark.parametrize("sizes", [(INLINE_BYTES,), (INLINE_BYTES + 1,), (3, INLINE_BYTES, 40_000, 0, 5)])
def test_large_messages_and_those_that_go_with_their_header(sizes: tuple[int, ...]) -> None:
    tensors = [torch.randint(0, 256, (size,)).to(torch.uint8) for size in sizes]
    with joined(transport="gloo") as pair:
        pair.out.send(message(1, *tensors, None))
        *received, none = pair.inbox.take().tensors
        assert none is None
        assert all(map(torch.equal, received, tensors))


def test_closing_while_a_payload_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the sender were stopped between a header and its payload."""
    monkeypatch.setattr(GlooOut, "follow", lambda *_: None)
    with nothing_left(), joined(transport="gloo") as pair:
        pair.out.send(message(1, torch.zeros(INLINE_BYTES)))
        pair.edges[1].close()
        assert pair.inbox.empty


def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    with (
        pytest.raises(EdgeError, match="this torch has no gloo; use the transport 'shared_memory'"),
        joined(transport="gloo"),
    ):
        pass
