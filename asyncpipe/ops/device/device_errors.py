"""Errors of an accelerator, as opposed to errors of the code that runs on it."""

from __future__ import annotations

import torch

__all__ = ["is_device_error"]


def is_device_error(error: BaseException) -> bool:
    """Whether a device has failed. Its kernels fail later than they are queued, so any later call may raise this.

    Most such errors stay: every other call on the device fails as well, until the process ends.
    """
    is_named = isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    return is_named or isinstance(error, torch.AcceleratorError)
