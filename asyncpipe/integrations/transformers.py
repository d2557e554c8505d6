"""transformers' ``Trainer`` over a pipeline: its loop, optimizer, schedule, callbacks and snapshots stay as they are.

What differs is who computes: ``training_step`` and ``compute_loss`` run a step of the pipeline instead of the model, so
gradients are in ``.grad`` of the model's parameters, on the devices of their stages, where Trainer clips and uses them.
The mini-batches that Trainer accumulates for one update travel as micro-batches of one step::

    Trainer    batch 0 ── batch 1 ── batch 2 ── batch 3 ── clip ── optimizer ── scheduler
                  └────────── collected ───────────┴─ one step of all four
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.microbatch import Microbatches, cut, keywords
from asyncpipe.ops.model.transformers.counted_loss import loss_kind
from asyncpipe.pipeline.from_transformers import from_transformers

if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from asyncpipe.pipeline.sync import SyncPipeline
else:
    _Base = object

__all__ = ["PipelineTrainer", "PipelineTraining", "token_loss"]

_IGNORED = -100
_MICROBATCHES = 8
"""Of a step, where neither the options nor the samples say of fewer."""
_STEPS_BY_PIPELINE = ("asyncpipe.integrations", "transformers.trainer", "trl.trainer.sft_trainer")
"""Modules whose ``compute_loss`` and ``training_step`` are the ones that a pipeline takes the place of."""


class PipelineTraining(_Base):  # type: ignore[misc]
    """Put before a trainer of transformers, it has the trainer's model computed by a pipeline.

    ``class MyTrainer(PipelineTraining, Trainer)``. ``pipeline`` has the arguments of ``from_transformers``:
    ``devices``, which a model with a ``device_map`` does without, ``microbatches`` (by default as many as there are
    samples for an update, at most 8) and the options of ``Pipeline``. Layers are recomputed as
    ``gradient_checkpointing`` says, and not by the pipeline besides, unless it is given a ``checkpoint``. Stages are on
    threads of this process. The pipeline is made when training or evaluation begins, and ends with the trainer, or in
    ``close``.

    Raises ``OptionError`` for what a pipeline would do in another way than the trainer is told to.
    """

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._options = dict(pipeline or {})
        self._pipe: SyncPipeline | None = None
        self._waiting: list[Any] = []
        """Mini-batches of the next update."""
        self._keeps_outputs = True
        self._draws = torch.Generator()
        super().__init__(*args, **kwargs)
        for reason in self.unfit():
            raise OptionError(f"{type(self).__name__}: {reason}")

    def unfit(self) -> list[str]:
        """What a pipeline does not do as the trainer is told, with what to do instead."""
        args, options = self.args, self._options
        steps = ("compute_loss", "training_step")
        own = [each for each in type(self).__mro__ if any(name in vars(each) for name in steps)]
        found = {
            f"{each.__name__} computes a loss of its own, which a pipeline would not call; give the pipeline a loss_fn "
            "in pipeline={'loss_fn': ...}, which gets (output, labels) and returns (mean, count)": True
            for each in own
            if not each.__module__.startswith(_STEPS_BY_PIPELINE)
        }
        found |= {
            "compute_loss_func gets the whole batch; give the pipeline a loss_fn in pipeline={'loss_fn': ...}, which "
            "gets (output, labels) of a micro-batch and returns (mean, count)": self.compute_loss_func is not None,
            "the pipeline has devices of several processes in one; start the script with python, not with torchrun or "
            "accelerate launch": args.world_size > 1,
            "FSDP and DeepSpeed spread a model in their own way; leave fsdp and deepspeed out": bool(
                args.fsdp or args.deepspeed
            ),
            "torch_compile compiles the whole model; give pipeline={'compile': True} instead": args.torch_compile,
            "fp16_full_eval and bf16_full_eval move the model to one device; load it in that type": bool(
                args.fp16_full_eval or args.bf16_full_eval
            ),
            f"optim={args.optim!s} updates inside the backward; choose an optimizer that has a step": "lomo"
            in str(args.optim).lower(),
            "config.ctc_loss_reduction='sum' would add up accumulated mini-batches, which the trainer divides by their "
            "number; set it to 'mean'": self._kind == "ctc"
            and args.gradient_accumulation_steps > 1
            and self.model.config.ctc_loss_reduction == "sum",
            "the optimizer is the trainer's; leave optimizer= out of pipeline": "optimizer" in options,
            "the trainer clips and uses gradients in this process, and those of workers stay there; leave workers= out "
            "of pipeline, or train with the pipeline's own loop": options.get("workers", "threads") != "threads",
        }
        return [reason for reason, is_so in found.items() if is_so]

    @property
    def pipe(self) -> SyncPipeline:
        """The pipeline of the model."""
        if self._pipe is None or self._pipe.module is not self.model:
            self.close()
            pipe = from_transformers(self.model, self._example(), **self._pipeline_options()).sync()
            self._pipe = pipe.__enter__()
        return self._pipe

    def close(self) -> None:
        """End the pipeline's threads; the next training or evaluation makes others."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _pipeline_options(self) -> dict[str, Any]:
        samples = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        found: dict[str, Any] = {
            "microbatches": min(samples, _MICROBATCHES),
            "checkpoint": "never",
            "workers": "threads",
            "generator": self._draws,
        }
        if (loss_fn := self._loss_fn()) is not None:
            found["loss_fn"] = loss_fn
        return found | self._options

    def _loss_fn(self) -> Callable[..., Any] | None:
        """The trainer's loss, where it is not the model's."""
        if self.label_smoother is None:
            return None
        return partial(token_loss, shift=self._kind == "causal", smoothing=self.label_smoother.epsilon)

    @property
    def _kind(self) -> str:
        """How the model computes its loss."""
        model: Any = self.model
        return loss_kind(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def _example(self) -> Any:
        """A batch of the first samples, without a draw from the generators that training uses."""
        has_training_data = self.train_dataset is not None
        if not has_training_data and not self.eval_dataset:
            return None
        state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            loader: Any = self.get_train_dataloader() if has_training_data else self.get_eval_dataloader()
            data, count = loader.dataset, self.args.per_device_train_batch_size
            is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
            first = [data[i] for i in range(min(count, len(data)))] if is_indexed else list(islice(data, count))
            return self._prepare_inputs(loader.collate_fn(first))
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])
            torch.set_rng_state(state[2])

    # What places and wraps the model

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's, without DataParallel and with weights where the stages have them."""
        assert self.args._setup_devices is not None
        self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Stages are moved to their devices."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        assert self.pipe is not None
        # accelerate would call the model in autocast; steps enter it instead.
        self.model._is_accelerate_prepared = True
        return self.model

    # Steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Collect the mini-batches of an update; with the last one, the gradients and the loss of all of them."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._waiting.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        each = max(1, self.pipe.microbatches // len(batches))
        pieces = [piece for batch in batches for piece in _pieces(batch, each)]
        # Draws of a step follow from its number, so a run that resumes repeats them, and the order of the samples,
        # which torch's own generator decides, is that of a trainer without a pipeline.
        self._draws.manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        with self.accelerator.autocast():
            result = self.pipe.step(
                Microbatches(pieces),
                return_outputs=False,
                scaler=self.accelerator.scaler,
                num_items_in_batch=self._items(num_items_in_batch),
            )
        assert result.loss is not None
        return result.loss.to(self.args.device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """The loss of a mini-batch by forwards alone, and the model's output; gradients are made by training_step."""
        is_row = _samples(inputs) == 1
        with torch.no_grad(), self.accelerator.autocast():
            result = self.pipe.step(
                Microbatches([dict(inputs)]) if is_row else inputs,
                return_outputs=return_outputs and self._keeps_outputs,
                num_items_in_batch=self._items(num_items_in_batch),
            )
        loss = None if result.loss is None else result.loss.to(self.args.device)
        outputs = result.outputs[0] if is_row and result.outputs else result.outputs
        return (loss, outputs or {}) if return_outputs else loss

    def _items(self, given: Tensor | int | None) -> Tensor | int | None:
        """What the labels are counted as; some losses count their own."""
        return None if self._kind == "ctc" or "loss_fn" in self._options else given

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """As Trainer's, by the pipeline in the place of the model."""
        self._keeps_outputs = not prediction_loss_only
        return super().prediction_step(self.pipe, inputs, prediction_loss_only, ignore_keys=ignore_keys)


class PipelineTrainer(PipelineTraining, Trainer):  # type: ignore[misc]
    """transformers' ``Trainer``, whose model trains as a pipeline: ``PipelineTrainer(..., pipeline={...})``.

    Everything else is as in ``Trainer``; ``PipelineTraining`` says what ``pipeline`` takes.
    """


def _samples(batch: Mapping[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, Tensor))


def _pieces(batch: Mapping[str, Any], count: int) -> list[Any]:
    """A mini-batch cut into micro-batches. One row is not: packed sequences have their lengths beside it."""
    return [dict(batch)] if _samples(batch) == 1 else cut(keywords(batch), count).pieces


def token_loss(output: Any, labels: Tensor, *, shift: bool, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of labels, with ``shift`` those one position on, and the number of labels that count."""
    logits: Tensor = output["logits"]
    if shift:
        labels = functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    count = (labels != _IGNORED).sum()
    total = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=_IGNORED, reduction="sum", label_smoothing=smoothing
    )
    return total / count.clamp(min=1), count
