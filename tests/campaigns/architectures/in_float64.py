"""Models whose libraries compute some steps in float32, all in float64, so that differences are those of a pipeline.

Norms, softmaxes and losses of transformers and diffusers cast to float32, whatever the type of the model. Such sums
differ in their last bits with the shape of a batch, which says nothing of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["in_float64"]


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, in all threads, casts of float64 to float32 leave it as it is."""

    def kept(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float64:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
            return original(tensor, *args, **kwargs)

        return call

    def cast(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor if tensor.dtype is torch.float64 else original(tensor)

    with (
        mock.patch.object(Tensor, "to", kept(Tensor.to)),
        mock.patch.object(Tensor, "type", kept(Tensor.type)),
        mock.patch.object(Tensor, "float", cast(Tensor.float)),
        mock.patch.object(Tensor, "softmax", kept(Tensor.softmax)),
        mock.patch.object(torch, "softmax", kept(torch.softmax)),
        mock.patch.object(functional, "softmax", kept(functional.softmax)),
        mock.patch.object(functional, "log_softmax", kept(functional.log_softmax)),
    ):
        yield
