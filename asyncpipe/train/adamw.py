"""The weight update: AdamW with the learning rate of the step, of the whole model or of each stage by itself.

::

    ClippedAdamW   step ─▶ norm of all gradients ─▶ clip ─▶ update     one after the other; an update can be skipped
    StagedAdamW    step: … U(0) … U(1) …                               updates are tasks of the step, and so is the norm

Both have the same state and give the same weights, so a run can go on with the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import cos, hypot, inf, isfinite, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.ops.device.copies import HostCopy
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.result import StepResult
from asyncpipe.train.job_file import TrainingTable

__all__ = ["BETAS", "ClippedAdamW", "StagedAdamW", "Update", "UpdateResult", "learning_rate"]

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
    """Whether loss and gradient norm are finite; a ``ClippedAdamW`` with ``only_finite`` does not update otherwise."""


class Update:
    """An update that is queued; its figures may still be on their way from a device."""

    def __init__(self, loss: Tensor, norms: Sequence[HostCopy]) -> None:
        """``norms`` of the gradients of disjoint parts of the model."""
        self._loss, self._norms = HostCopy(loss.detach()), norms

    def wait(self) -> UpdateResult:
        """The figures; blocks until the device has made them, and not for what was queued later."""
        loss, norm = self._loss.wait().item(), hypot(*(norm.wait().item() for norm in self._norms))
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
        self.optimizer = _adamw(self._parameters, training)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the moments from ``state``, but keep the job's own settings, which may have changed since."""
        _load(self.optimizer, state)

    def update(self, rate: float, loss: Tensor | None) -> Update:
        """Update the weights with the learning rate ``rate``, and clear the gradients.

        Waits for the loss's device if the update depends on the loss and is not checked there.
        """
        assert loss is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        made = Update(loss, [HostCopy(norm)])
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


class StagedAdamW:
    """One AdamW for each stage, whose updates are tasks of the steps; its state is that of a ``ClippedAdamW``.

    Give ``make`` to a pipeline as its ``optimizer``, and the rate to each step, wherever the stages are. The state is
    read and set between two steps.
    """

    def __init__(self, training: TrainingTable) -> None:
        self._training = training
        self._rate = training.learning_rate
        """Of the last update."""
        self._pipe: Pipeline | None = None

    @property
    def make(self) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        """Makes the optimizer of a stage, also in a worker."""
        return partial(_adamw, training=self._training)

    def attach(self, pipe: Pipeline) -> None:
        """``pipe`` has the optimizers, and results with norms."""
        self._pipe = pipe

    def take(self, result: StepResult, rate: float) -> Update:
        """The update of a step that is issued, and that had this learning rate."""
        assert result.loss is not None
        self._rate = rate
        norms = [*result.gradient_norms.values()] if result.gradient_norm is None else [result.gradient_norm]
        return Update(result.loss, list(map(HostCopy, norms)))

    def state_dict(self) -> dict[str, Any]:
        """The state that one AdamW over all parameters would have."""
        assert self._pipe is not None
        whole, names = self._whole()
        states = self._pipe.optimizer_states()
        for parameter, name in names.items():
            if name in states:
                whole.state[parameter] = states[name]
        return self._state_of(whole)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As ``ClippedAdamW.load_state_dict``."""
        assert self._pipe is not None
        whole, names = self._whole()
        _load(whole, state)
        self._pipe.load_optimizer_states(
            {name: whole.state[parameter] for parameter, name in names.items() if parameter in whole.state},
            strict=False,  # Before its first step it remembers nothing.
        )

    def settings_dict(self) -> dict[str, Any]:
        """As ``state_dict``, without what is remembered of the parameters."""
        return self._state_of(self._whole()[0])

    def names(self) -> list[str]:
        """The names of the parameters, by their numbers in the state."""
        whole, names = self._whole()
        return [names[parameter] for group in whole.param_groups for parameter in group["params"]]

    def check_settings(self, state: dict[str, Any]) -> None:
        """Raise ``ValueError`` if ``state`` is that of an optimizer of other parameters."""
        _load(self._whole()[0], {**state, "state": {}})

    def _state_of(self, whole: torch.optim.Optimizer) -> dict[str, Any]:
        for group in whole.param_groups:
            group["lr"] = self._rate
        return whole.state_dict()

    def _whole(self) -> tuple[torch.optim.Optimizer, dict[nn.Parameter, str]]:
        """One AdamW over stand-ins for all parameters, which may be in workers, and the names of these."""
        assert self._pipe is not None
        names = {
            nn.Parameter(torch.empty((0,) * each.dim(), dtype=each.dtype)): name
            for name, each in self._pipe.module.named_parameters()
            if each.requires_grad
        }
        return _adamw(names, self._training), names


def _adamw(parameters: Iterable[nn.Parameter], training: TrainingTable) -> torch.optim.AdamW:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # As usual, norms and biases have no weight decay: decay is there to keep matrix products small.
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [each for each in trained if each.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take the moments from ``state``, but keep the job's own settings, which may have changed since."""
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
