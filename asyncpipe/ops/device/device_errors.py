"""Errors of an accelerator, as opposed to errors of the code that runs on it."""

from __future__ import annotations

import torch

__all__ = ["is_device_error"]

_ACCELERATOR_ERROR: type[RuntimeError] | None = getattr(torch, "AcceleratorError", None)  # Since torch 2.8.


def is_device_error(error: BaseException) -> bool:
    """Whether a device has failed. Its kernels fail later than they are queued, so any later call may raise this.

    Most such errors stay: every other call on the device fails as well, until the process ends.
    """
    if _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
