"""What a program has set for all of torch in its process, which a worker's stages are to compute by as well."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["ProcessSettings"]


class ProcessSettings(NamedTuple):
    """Those that results depend on; by default torch's own."""

    dtype: torch.dtype = torch.float32
    """Of new tensors, and of an integer tensor times a float."""
    deterministic: bool = False
    warn_only: bool = False
    matmul_precision: str = "highest"

    @classmethod
    def current(cls) -> ProcessSettings:
        """Those of this process."""
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Make them those of this process."""
        if self != ProcessSettings.current():
            torch.set_default_dtype(self.dtype)
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
            torch.set_float32_matmul_precision(self.matmul_precision)
