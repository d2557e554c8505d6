"""The update of the weights: AdamW after clipping, at the learning rate of the step."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, inf, isfinite, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.train.job_file import TrainingTable

__all__ = ["BETAS", "ClippedAdamW", "UpdateResult", "learning_rate"]

BETAS = (0.9, 0.95)
"""As is usual for transformers: the second moment forgets within some 20 steps."""


def learning_rate(step: int, training: TrainingTable) -> float:
    """The rate of ``step``, from 0: a linear warm-up to the highest one, then half a cosine towards 0."""
    warmup = min(training.warmup_steps, training.steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(training.steps - warmup, 1)
    return training.learning_rate * 0.5 * (1 + cos(pi * done))


class UpdateResult(NamedTuple):
    """What became of a step's gradients."""

    loss: float
    gradient_norm: float
    """Of all gradients together, before clipping."""
    finite: bool
    """Whether both are numbers; where they are not, and that was looked at, the weights are as they were."""


class ClippedAdamW:
    """AdamW and clipping; used by one thread at a time."""

    def __init__(self, parameters: Iterable[nn.Parameter], training: TrainingTable, *, only_finite: bool) -> None:
        """``only_finite``: an update whose loss or gradient norm is NaN or infinite is left out."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._clip = training.clip if training.clip is not None else inf
        self._only_finite = only_finite
        # Norms and biases are left out of weight decay, as is usual: decay is there to keep products small.
        matrices = [parameter for parameter in self._parameters if parameter.dim() > 1]
        others = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the optimizer's moments from ``state``; the job's own settings stay, as it may have other ones now."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        self.optimizer.load_state_dict(state)
        for group, settings in zip(self._groups, own, strict=True):
            group.update(settings)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def update(self, rate: float, loss: Tensor | None) -> UpdateResult:
        """Move the weights along their gradients and clear these. Waits for the device that has ``loss``."""
        assert loss is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        # Read before the update only where it hangs on that: on a GPU this waits for all kernels of the step.
        if not self._only_finite or _finite(loss, norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return UpdateResult(loss.item(), norm.item(), _finite(loss, norm))


def _finite(loss: Tensor, norm: Tensor) -> bool:
    return isfinite(loss.item()) and isfinite(norm.item())
