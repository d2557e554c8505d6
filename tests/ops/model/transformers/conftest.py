"""Models of transformers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library computes norms and losses in float32; here it stays in float64, where sums can be compared."""
    to = Tensor.to

    def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lowers = tensor.dtype is torch.float64 and args[:1] == (torch.float32,)
        return tensor if lowers else to(tensor, *args, **kwargs)

    log_softmax = torch.nn.functional.log_softmax
    monkeypatch.setattr(torch.nn.functional, "log_softmax", lambda logits, dim, dtype=None: log_softmax(logits, dim))
    monkeypatch.setattr(Tensor, "to", kept)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.manual_seed(0)
