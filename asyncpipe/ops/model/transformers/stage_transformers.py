"""``stage_transformers``: what the model is, whether it can be cut, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.transformers.counted_loss import CountedLoss, check_loss, loss_kind
from asyncpipe.ops.model.transformers.cut import cut_at_layers
from asyncpipe.ops.model.transformers.dispatched import take_off_hooks
from asyncpipe.ops.model.transformers.families import find_trunks, forget_captures, has_router_loss
from asyncpipe.ops.model.transformers.refusals import refuse_unfit
from asyncpipe.ops.model.transformers.traced import trace_at_layers

__all__ = ["stage_transformers"]


def stage_transformers(
    module: nn.Module, batch: Any, *, own_loss: bool = True, loss_form: str | None = None
) -> StagedModel:
    """``module``, a model of transformers or a ``PeftModel``, as stages that ``joined`` makes fewer of.

    ``batch`` is an example, for models that have to be traced. Without ``own_loss`` the caller brings a loss.
    ``loss_form`` is ``loss`` of ``from_transformers``. Raises ``OptionError`` for what stages would get wrong.
    """
    if loss_form not in (None, "chunked") or (loss_form and not own_loss):
        raise OptionError(f"loss must be 'chunked' or left out, and goes without a loss_fn, got {loss_form!r}")
    model = _unwrapped(module)
    refuse_unfit(model)
    loss = _loss(model, own_loss)
    if loss is not None and loss.kind:
        loss = check_loss(module, loss, batch)
    take_off_hooks(module)
    if has_router_loss(model):
        forget_captures(model)
    if loss_form:
        trunks = find_trunks(model)
        loss = (loss or CountedLoss.of(model, "")).in_chunks(model, trunks[-1].path if trunks else "")
    staged = cut_at_layers(module, model, batch, loss)
    return trace_at_layers(module, model, batch, loss) if staged is None else staged


def _unwrapped(module: Any) -> nn.Module:
    """The model of transformers in ``module``."""
    if not isinstance(module, nn.Module):
        raise OptionError(f"model must be a model of transformers, got {type(module).__name__}")
    unwrap: Callable[[], nn.Module] | None = getattr(module, "get_base_model", None)
    model = module
    if unwrap is not None:
        # A PeftModel. What it does besides calling the model, prompt learning for instance, stages would not do.
        config: Any = module.active_peft_config
        if getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None):
            raise OptionError(
                f"{type(config).__name__} changes what the model is called with, which stages do not see; use an "
                "adapter inside the layers, such as LoRA"
            )
        model = unwrap()
    if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        raise OptionError(
            f"model must be a PreTrainedModel of transformers or a PeftModel, got {type(model).__name__}; give other "
            "models to Pipeline, as a sequence of layers or cut by asyncpipe.trace"
        )
    return model


def _loss(model: nn.Module, own_loss: bool) -> CountedLoss | None:
    if not own_loss:
        return CountedLoss.of(model, "")
    kind = loss_kind(model)
    if kind and "_loss_function" in vars(model):
        raise OptionError(
            f"{type(model).__name__} has a loss_function of its own, of which nothing tells how many labels it is a "
            "mean of; give loss_fn=, which gets (output, labels) and returns the loss, or (mean, count)"
        )
    return CountedLoss.of(model, kind) if kind else None
