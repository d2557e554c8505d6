"""Which stages use which parameters and buffers, for ties, for what workers are sent, and for refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["TensorUse", "tensor_uses"]


class TensorUse(NamedTuple):
    """A place where a stage uses a parameter or buffer: a module, and the name there."""

    stage: int
    path: str
    """The module's name in the stage."""
    module: nn.Module
    name: str

    @property
    def table(self) -> dict[str, Tensor | None]:
        """The module's table that has it."""
        parameters: dict[str, Tensor | None] = self.module._parameters  # type: ignore[assignment]
        return parameters if self.name in parameters else self.module._buffers

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        tensor = self.table[self.name]
        assert tensor is not None
        return tensor

    @property
    def full_name(self) -> str:
        """The tensor's name in the stage."""
        return f"{self.path}.{self.name}" if self.path else self.name


def tensor_uses(stages: Sequence[nn.Module]) -> dict[int, list[TensorUse]]:
    """By id of each parameter and buffer: where stages use it, in their order."""
    uses: dict[int, list[TensorUse]] = {}
    for stage, part in enumerate(stages):
        for path, module in part.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        uses.setdefault(id(tensor), []).append(TensorUse(stage, path, module, name))
    return uses
