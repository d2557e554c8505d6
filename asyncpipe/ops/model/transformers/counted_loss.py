"""The losses of transformers' models, as a mean and the number of labels that it is of.

So micro-batches of any size, padded in any way, make the mean of the whole batch as the model itself computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe.errors import BatchError, LossError, OptionError
from asyncpipe.ops.autograd.chunked_sum import chunked_sum
from asyncpipe.ops.model.evaluation import evaluating
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.transformers.batch_inputs import LABELS, label_names
from asyncpipe.ops.model.transformers.families import has_router_loss

__all__ = ["CountedLoss", "check_loss", "loss_kind"]

CHUNK = 1 << 24
"""Logits that a loss by chunks makes at once: 131 tokens of a vocabulary of 128,000."""
_IGNORED = -100
_SUFFIXES = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassification": "classes",
    "ForImageClassification": "classes",
    "ForNextSentencePrediction": "classes",
    "ForQuestionAnswering": "spans",
    "ForCTC": "ctc",
    "ForMaskedImageModeling": "patches",
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

    ``kind`` is ``"causal"`` (each token is the label of the one before), ``"tokens"``, ``"classes"``, ``"spans"``
    (where an answer starts and ends), ``"ctc"``, ``"patches"`` (of images, which are masked), or empty if the
    caller brings the loss.
    """

    name: str
    """Of the model's class, for messages."""
    kind: str
    classes: int = 0
    problem: str | None = None
    """``problem_type`` of the model's config."""
    labels: tuple[str, ...] = (LABELS,)
    """What the model calls them."""
    chunk: int = 0
    """The tokens whose logits are made at once, by the loss; 0 if those of all are, by the last stage."""
    routers: float = 0.0
    """What the model multiplies the loss of its routers by, which it adds; of each micro-batch by its own tokens."""
    ctc: Mapping[str, Any] | None = None
    """How ``ctc_loss`` is called."""
    frames: Callable[[Tensor], Tensor] | None = None
    """For CTC: how many frames the logits have, by the length of the sound."""

    @classmethod
    def of(cls, model: nn.Module, kind: str) -> CountedLoss:
        """That of ``model``."""
        config: Any = model.config
        labels = ("bool_masked_pos", "pixel_values") if kind == "patches" else label_names(model)
        problem = None if "NextSentence" in type(model).__name__ else getattr(config, "problem_type", None)
        made = cls(type(model).__name__, kind, getattr(config, "num_labels", 0), problem, labels)
        if has_router_loss(model):
            made = replace(made, routers=config.router_aux_loss_coef)
        if kind != "ctc":
            return made
        how = {"blank": config.pad_token_id, "reduction": config.ctc_loss_reduction}
        frames = partial(type(model)._get_feat_extract_output_lengths, SimpleNamespace(config=config))  # type: ignore[attr-defined]
        return replace(made, ctc={**how, "zero_infinity": config.ctc_zero_infinity}, frames=frames)

    def in_chunks(self, model: nn.Module, trunk: str) -> CountedLoss:
        """That of a head, behind the ``trunk``, whose logits never exist whole. Raises ``OptionError``."""
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if self.kind not in ("causal", "tokens") or not trunk or head is None:
            raise OptionError(
                f"loss='chunked' is for heads that predict tokens of a vocabulary, on models that are cut without a "
                f"trace; {self.name} has another; leave loss out"
            )
        return replace(self, chunk=max(1, CHUNK // len(head.weight)))

    @property
    def is_sum(self) -> bool:
        """Whether that of a batch is the sum over its samples, not a mean."""
        return self.ctc is not None and self.ctc["reduction"] == "sum"

    def target(self, arguments: Arguments) -> Any:
        """The labels in a batch: a tensor, or a dict if there are others than ``labels``; ``None`` if it has none."""
        args, kwargs = arguments
        batch = kwargs if kwargs or len(args) != 1 else args[0]
        if not hasattr(batch, "get"):
            return None
        found: dict[str, Any] = {name: batch.get(name) for name in self.labels if batch.get(name) is not None}
        if self.kind == "ctc" and found:
            sound: Any = batch.get("input_values", batch.get("input_features"))
            mask = batch.get("attention_mask")
            found["attention_mask"] = torch.ones_like(sound, dtype=torch.long) if mask is None else mask
        if self.kind == "spans" and len(found) == len(self.labels):
            _check_spans(found, batch)
        return found.get(LABELS) if [*found] == [LABELS] else found or None

    def with_loss(self, output: Any, target: Any) -> Any:
        """``output`` with the loss, as the model returns it."""
        if not self.kind:
            return output
        if self.routers:
            raise BatchError(
                f"the loss of the routers of {self.name} is that of a micro-batch, and a call makes none; give the "
                "labels to pipe.step, or leave them out"
            )
        device = _scores(output).device
        labels = {name: each.to(device) for name, each in target.items()} if isinstance(target, dict) else target
        loss = self(output, labels if isinstance(labels, dict) else labels.to(device))
        if isinstance(loss, tuple):
            # Of no labels, the model's mean is no number.
            loss = torch.where(loss[1] > 0, loss[0], torch.nan)
        return type(output)(**{"loss": loss} | {name: each for name, each in output.items() if name != "loss"})

    def __call__(self, output: Any, target: Any = None) -> Any:
        """The mean loss, and the number of labels that are not ignored; or a sum. ``output``: logits, or the head."""
        labels = target
        if self.kind in ("spans", "ctc", "patches"):
            if not isinstance(labels, Mapping):
                raise LossError(f"the loss of {self.name} needs {' and '.join(self.labels)} by name, in the batch")
            if self.kind == "spans":
                return self._of_spans(output, labels)
            if self.kind == "ctc":
                return self._of_ctc(output["logits"], labels)
            return _of_patches(output["reconstruction"], **labels)
        if not isinstance(labels, Tensor):
            raise LossError(
                f"the loss of {self.name} needs labels as a tensor: give them in the batch, or as the target"
            )
        if self.kind == "classes":
            return self._of_classes(output["logits"], labels)
        if self.kind == "causal":
            labels = functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        if "head" in output:
            mean, count = self._in_chunks(output, labels)
        else:
            logits = self._upcast(output["logits"])
            mean, count = _cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return mean + self.routers * output["aux_loss"] if self.routers else mean, count

    def _upcast(self, logits: Tensor) -> Tensor:
        # As the library does it, so that no sum over a large vocabulary is taken in half precision.
        halves = self.kind == "causal" and logits.dtype in (torch.float16, torch.bfloat16)
        return logits.float() if halves else logits

    def _in_chunks(self, output: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        head, call = output["head"], output["call"]

        def summed(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = self._upcast(head.logits(hidden, call))
            return functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")

        hidden, labels = output["hidden"].flatten(0, -2), labels.reshape(-1)
        count = (labels != _IGNORED).sum()
        total = chunked_sum(summed, hidden, labels, head.head_parameters(), chunk=self.chunk)
        return total / count.clamp(min=1), count

    def _of_spans(self, output: Any, labels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        means, counts = [], []
        for end in ("start", "end"):
            logits = output[f"{end}_logits"]
            positions = labels[f"{end}_positions"].reshape(-1).clamp(0, logits.shape[1])
            mean, count = _cross_entropy(logits, positions, logits.shape[1])
            means.append(mean)
            counts.append(count)
        return sum(means[1:], means[0]) / 2, counts[0]

    def _of_ctc(self, logits: Tensor, labels: Mapping[str, Tensor]) -> Any:
        assert self.ctc is not None
        assert self.frames is not None
        tokens = labels[LABELS]
        is_label = (tokens != _IGNORED) & (tokens != self.ctc["blank"])
        frames = self.frames(labels["attention_mask"].sum(-1)).long()
        rows = functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
        with torch.backends.cudnn.flags(enabled=False):
            lengths = is_label.sum(-1)
            loss = functional.ctc_loss(rows, tokens.masked_select(is_label), frames, lengths, **self.ctc)
        return loss if self.is_sum else (loss, torch.tensor(float(len(tokens))))

    def _of_classes(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.problem
        if problem is None:
            is_whole = labels.dtype in (torch.int32, torch.int64)
            problem = "single_label_classification" if is_whole else "multi_label_classification"
            problem = "regression" if self.classes == 1 else problem
        if problem == "single_label_classification":
            return _cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
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
    with evaluating(module), torch.no_grad(), torch.random.fork_rng():
        labels = loss.target(Arguments((), dict(batch)))
        if labels is None:
            labels = _made_up(module(**batch).logits, loss.kind)
            batch = {**batch, LABELS: labels}
        if labels is None:
            return loss
        output = module(**batch)
    wanted = float(output.loss)
    if not isfinite(wanted):
        return loss
    kinds = ("causal", "tokens") if loss.kind in ("causal", "tokens") else (loss.kind,)
    found = [replace(loss, kind=kind) for kind in kinds]
    # A dispatched model has returned them on another device than it was given the labels on.
    labels = labels.to(_scores(output).device) if isinstance(labels, Tensor) else labels
    means = [each(output, labels) for each in found]
    apart = [abs(float(mean[0] if isinstance(mean, tuple) else mean) - wanted) for mean in means]
    tolerance = 1e-4 if _scores(output).dtype in (torch.float32, torch.float64) else 1e-2
    if min(apart) <= tolerance * abs(wanted) + tolerance:
        return found[apart.index(min(apart))]
    raise OptionError(
        f"{loss.name} computes a loss of {wanted:.4g} for the example batch, which is neither the mean over "
        "its labels nor over the labels one position on; give loss_fn=, which gets (output, labels) and returns the "
        "loss, or (mean, count)"
    )


def _scores(output: Any) -> Tensor:
    """The logits, or what ``output`` has in their place."""
    scores: Tensor = next(each for each in output.values() if isinstance(each, Tensor) and each.dim())
    return scores


def _made_up(logits: Tensor, kind: str) -> Tensor | None:
    """Labels for each position, of which one is ignored; ``None`` if labels are of another kind."""
    if kind not in ("causal", "tokens") or logits.dim() < 3:
        return None
    labels = torch.arange(logits[..., 0].numel(), device=logits.device).reshape(logits.shape[:-1]) % logits.shape[-1]
    labels[0, 0] = _IGNORED
    return labels


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int = _IGNORED) -> tuple[Tensor, Tensor]:
    count = (labels != ignored).sum()
    # Of no labels it is zero: other micro-batches have some.
    return functional.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum") / count.clamp(min=1), count


def _of_patches(made: Tensor, bool_masked_pos: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over masked pixels. The model adds 1e-5 to their number, which is lost here."""
    size = round(bool_masked_pos.shape[1] ** 0.5)
    mask = functional.interpolate(bool_masked_pos.reshape(-1, 1, size, size).to(made.dtype), made.shape[-2:])
    total = ((made - pixel_values).abs() * mask).sum() / made.shape[1]
    return total / mask.sum().clamp(min=1), mask.sum()


def _check_spans(labels: Mapping[str, Tensor], batch: Any) -> None:
    """Raise ``BatchError`` for answers of which one end is outside of the tokens, and is no label, and one is not."""
    tokens = batch.get("input_ids", batch.get("inputs_embeds")).shape[1]
    start, end = (labels[f"{which}_positions"].reshape(-1) >= tokens for which in ("start", "end"))
    if bool((start != end).any()):
        raise BatchError(
            f"start_positions and end_positions: an answer begins within the {tokens} tokens and ends behind them, so "
            "there are two numbers of labels; move both ends behind them, which leaves the answer out"
        )
