"""The weight update: clipping, then AdamW with the learning rate of the step."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, inf, isfinite, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.ops.device.copies import HostCopy
from asyncpipe.train.job_file import TrainingTable

__all__ = ["BETAS", "ClippedAdamW", "Update", "UpdateResult", "learning_rate"]

BETAS = (0.9, 0.95)
"""Usual for transformers: the second moment is an average over about 20 steps."""


def learning_rate(step: int, training: TrainingTable) -> float:
    """The learning rate of ``step``, from 0: a linear warm-up to the highest one, then half a cosine towards 0."""
    warmup = min(training.warmup_steps, training.steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(training.steps - warmup, 1)
    return training.learning_rate * 0.5 * (1 + cos(pi * done))


class UpdateResult(NamedTuple):
    """The figures of one weight update."""

    loss: float
    gradient_norm: float
    """Of all gradients together, before clipping."""
    finite: bool
    """Whether loss and gradient norm are finite; with ``only_finite``, the weights are not updated otherwise."""


class Update:
    """An update that is queued; its figures may still be on their way from a device."""

    def __init__(self, loss: Tensor, norm: Tensor) -> None:
        self._loss, self._norm = HostCopy(loss.detach()), HostCopy(norm)

    def wait(self) -> UpdateResult:
        """The figures; blocks until the device has made them, and not for what was queued later."""
        loss, norm = self._loss.wait().item(), self._norm.wait().item()
        return UpdateResult(loss, norm, isfinite(loss) and isfinite(norm))


class ClippedAdamW:
    """AdamW with clipped gradients; for one thread at a time."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        training: TrainingTable,
        *,
        only_finite: bool,
        checks_on_device: bool = False,
    ) -> None:
        """``only_finite``: skip an update if the loss or the gradient norm is NaN or infinite.

        With ``checks_on_device`` no update waits for the device to know that; the device then skips all later ones as
        well, since the host learns of it some steps later. All parameters must be on accelerators.
        """
        self._checks_on_device = checks_on_device
        self._skips: Tensor | None = None
        """1 on the device once a loss or norm was not finite."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._clip = training.clip if training.clip is not None else inf
        self._only_finite = only_finite
        # As usual, norms and biases have no weight decay: decay is there to keep matrix products small.
        matrices = [parameter for parameter in self._parameters if parameter.dim() > 1]
        others = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the moments from ``state``, but keep the job's own settings, which may have changed since."""
        groups = self.optimizer.param_groups
        own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.optimizer.load_state_dict(state)
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)

    def update(self, rate: float, loss: Tensor | None) -> Update:
        """Update the weights with the learning rate ``rate``, and clear the gradients.

        Waits for the loss's device if the update depends on the loss and is not checked there.
        """
        assert loss is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        made = Update(loss, norm)
        if self._only_finite and self._checks_on_device:
            self._skip_on_device(loss, norm)
        # Only read before the update if the update depends on it: on a GPU, reading waits for all kernels of the step.
        if not self._only_finite or self._checks_on_device or made.wait().finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return made

    def _skip_on_device(self, loss: Tensor, norm: Tensor) -> None:
        zero = loss.detach().to(norm.device) * 0 + norm * 0  # NaN if one of the two is not finite.
        bad = (zero != 0).float()
        self._skips = bad if self._skips is None else torch.maximum(self._skips, bad)
        # As a GradScaler tells a fused optimizer not to update.
        self.optimizer.found_inf = self._skips  # type: ignore[attr-defined]
