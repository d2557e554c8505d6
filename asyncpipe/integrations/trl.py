"""TRL's ``SFTTrainer`` over a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTTrainer
from trl.trainer.utils import entropy_from_logits

from asyncpipe.integrations.transformers import PipelineTraining, token_loss
from asyncpipe.ops.autograd.checkpoint import is_recomputing

__all__ = ["PipelineSFTTrainer"]


class PipelineSFTTrainer(PipelineTraining, SFTTrainer):  # type: ignore[misc]
    """TRL's ``SFTTrainer``, whose model trains as a pipeline: ``PipelineSFTTrainer(..., pipeline={...})``.

    The loss is that of SFTTrainer by labels (``loss_type="nll"``), and entropy, accuracy and tokens are logged as
    there, once for each update. ``PipelineTraining`` says what ``pipeline`` takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seen: list[Tensor] = []
        """Of each micro-batch since the last metrics: the sum of entropies, correct tokens, and tokens."""
        super().__init__(*args, **kwargs)
        model: Any = self.model
        # What computes tokens in the place of logits; stages have the logits of their micro-batches alone.
        vars(model.get_base_model() if hasattr(model, "get_base_model") else model).pop("forward", None)

    def unfit(self) -> list[str]:
        """As ``PipelineTraining.unfit``."""
        found = {
            f"loss_type={self.args.loss_type!r} weights tokens by their probability; give pipeline={{'loss_fn': ...}} "
            "and leave loss_type out": self.args.loss_type != "nll",
            "activation_offloading hooks every tensor of the forward; give pipeline={'offload': ...} instead": bool(
                self.args.activation_offloading
            ),
            "the model is to return router logits, whose auxiliary loss SFTTrainer adds; give "
            "router_aux_loss_coef=0.0": getattr(self, "aux_loss_enabled", False),
        }
        return [*super().unfit(), *(reason for reason, is_so in found.items() if is_so)]

    def _loss_fn(self) -> Callable[..., Any]:
        smoothing = 0.0 if self.label_smoother is None else self.label_smoother.epsilon

        def loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
            if not is_recomputing():
                self._seen.append(_token_sums(output["logits"].detach(), labels))
            return token_loss(output, labels, shift=True, smoothing=smoothing)

        return loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """As ``PipelineTraining.training_step``, with SFTTrainer's metrics."""
        counted = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(inputs["input_ids"])
        self._total_train_tokens += int(counted.sum())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._log_tokens("train")
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As ``PipelineTraining.compute_loss``, with SFTTrainer's metrics."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._log_tokens("train" if self.model.training else "eval")
        return found

    def _log_tokens(self, mode: str) -> None:
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        if self._seen:
            # Hazard: the sums were allocated on the last stage's stream. They are read here, to the end, before their
            # memory can be used again.
            entropy, correct, count = torch.stack(self._seen).sum(0).tolist()
            self._seen.clear()
            metrics["entropy"].append(entropy / count if count else 0.0)
            metrics["mean_token_accuracy"].append(correct / count if count else 0.0)


def _token_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """The entropies, the correct predictions and the number of the labels one position on, as float64."""
    with torch.no_grad():
        labels = labels[..., 1:]
        counted = labels != -100
        logits, labels = logits[..., :-1, :][counted].float(), labels[counted]
        entropy = entropy_from_logits(logits).sum() if len(labels) else logits.new_zeros(())
        sums = (entropy, (logits.argmax(-1) == labels).sum(), counted.sum())
        return torch.stack([each.double() for each in sums])
