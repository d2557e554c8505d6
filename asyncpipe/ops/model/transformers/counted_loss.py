"""The losses of transformers' models, as a mean and the number of labels that it is of.

So micro-batches of any size, padded in any way, make the mean of the whole batch as the model itself computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe.errors import LossError, OptionError
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.transformers.batch_inputs import LABELS

__all__ = ["CountedLoss", "check_loss", "loss_kind"]

_IGNORED = -100
_SUFFIXES = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassification": "classes",
    "ForImageClassification": "classes",
}


def loss_kind(model: nn.Module) -> str:
    """How ``model`` computes its loss; empty where it has none that can be counted."""
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if name.endswith("ForConditionalGeneration") and getattr(config, "is_encoder_decoder", False):
        return "tokens"
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "")


@dataclass(frozen=True, slots=True)
class CountedLoss:
    """The loss that a model computes if its batch has labels, and the labels in a batch.

    ``kind`` is ``"causal"`` (each token is the label of the one before), ``"tokens"``, ``"classes"``, or empty if the
    caller brings the loss.
    """

    name: str
    """Of the model's class, for messages."""
    kind: str
    classes: int = 0
    problem: str | None = None
    """``problem_type`` of the model's config."""

    @classmethod
    def of(cls, model: nn.Module, kind: str) -> CountedLoss:
        """That of ``model``."""
        config: Any = model.config
        return cls(type(model).__name__, kind, getattr(config, "num_labels", 0), getattr(config, "problem_type", None))

    def target(self, arguments: Arguments) -> Any:
        """The labels in a batch; ``None`` if it has none."""
        args, kwargs = arguments
        batch = kwargs if kwargs or len(args) != 1 else args[0]
        return batch.get(LABELS) if hasattr(batch, "get") else None

    def with_loss(self, output: Any, target: Any) -> Any:
        """``output`` with the loss, as the model returns it."""
        if not self.kind:
            return output
        loss, count = self(output, target.to(output.logits.device))
        # Of no labels, the model's mean is no number.
        return type(output)(loss=torch.where(count > 0, loss, torch.nan), **dict(output.items()))

    def __call__(self, output: Any, target: Any = None) -> tuple[Tensor, Tensor]:
        """The mean loss, and the number of labels that are not ignored. ``output`` has the logits."""
        labels = target
        if not isinstance(labels, Tensor):
            raise LossError(
                f"the loss of {self.name} needs labels as a tensor: give them in the batch, or as the target"
            )
        logits: Tensor = output["logits"]
        if self.kind == "classes":
            return self._of_classes(logits, labels)
        if self.kind == "causal":
            labels = functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
            # As the library does it, so that no sum over a large vocabulary is taken in half precision.
            logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return _cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    def _of_classes(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.problem
        if problem is None:
            is_whole = labels.dtype in (torch.int32, torch.int64)
            problem = "single_label_classification" if is_whole else "multi_label_classification"
            problem = "regression" if self.classes == 1 else problem
        if problem == "single_label_classification":
            return _cross_entropy(logits.reshape(-1, self.classes), labels.reshape(-1))
        count = torch.tensor(float(labels.numel()))
        if problem == "multi_label_classification":
            return functional.binary_cross_entropy_with_logits(logits, labels), count
        if self.classes == 1:
            logits, labels = logits.reshape(-1), labels.reshape(-1)
        return functional.mse_loss(logits, labels), count


def check_loss(module: nn.Module, loss: CountedLoss, batch: Any) -> CountedLoss:
    """``loss``, or one of another kind that is what ``module`` itself computes of ``batch``: names may mislead.

    One forward in evaluation mode. Raises ``OptionError`` if the model's loss is none of them. Looks at nothing if the
    model has no values, or if neither the batch nor the kind tells what labels are like.
    """
    if not isinstance(batch, Mapping) or any(parameter.is_meta for parameter in module.parameters()):
        return loss
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            labels = batch.get(LABELS)
            if labels is None:
                labels = _made_up(module(**batch).logits, loss.kind)
            if labels is None:
                return loss
            output = module(**{**batch, LABELS: labels})
    finally:
        for each in training:
            each.training = True
    wanted = float(output.loss)
    if not isfinite(wanted):
        return loss
    kinds = (loss.kind,) if loss.kind == "classes" else ("causal", "tokens")
    found = [replace(loss, kind=kind) for kind in kinds]
    apart = [abs(float(each(output, labels)[0]) - wanted) for each in found]
    tolerance = 1e-4 if output.logits.dtype in (torch.float32, torch.float64) else 1e-2
    if min(apart) <= tolerance * abs(wanted) + tolerance:
        return found[apart.index(min(apart))]
    raise OptionError(
        f"{loss.name} computes a loss of {wanted:.4g} for the example batch, which is neither the mean over "
        "its labels nor over the labels one position on; give loss_fn=, which gets (output, labels) and returns the "
        "loss, or (mean, count)"
    )


def _made_up(logits: Tensor, kind: str) -> Tensor | None:
    """Labels for each position, of which one is ignored; ``None`` if labels are of another kind."""
    if kind == "classes" or logits.dim() < 3:
        return None
    labels = torch.arange(logits[..., 0].numel(), device=logits.device).reshape(logits.shape[:-1]) % logits.shape[-1]
    labels[0, 0] = _IGNORED
    return labels


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    count = (labels != _IGNORED).sum()
    # Of no labels it is zero: other micro-batches have some.
    return functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum") / count.clamp(min=1), count
