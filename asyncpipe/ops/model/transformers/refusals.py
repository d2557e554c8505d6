"""What stages of a model would get wrong without a word, and is therefore refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.stage import has_hooks
from asyncpipe.ops.model.transformers.dispatched import unfit_hooks
from asyncpipe.ops.model.transformers.families import has_router_loss
from asyncpipe.ops.model.transformers.image import Image

__all__ = ["refuse_hooked_images", "refuse_reentrant", "refuse_unfit"]

_CHECKPOINT = (
    "reentrant gradient checkpointing makes gradients behind the back of a stage; call "
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}), or '
    "model.gradient_checkpointing_disable() and give the pipeline checkpoint='always'"
)
_OUTPUTS = {
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
    "return_dict": False,
}


def refuse_unfit(model: nn.Module) -> None:
    """Raise ``OptionError`` for what a pipeline of ``model`` cannot do as the model does it, however it is cut."""
    name = type(model).__name__
    for reason in (*_of_config(model), *_of_modules(model), *unfit_hooks(model)):
        raise OptionError(f"{name}: {reason}")


def refuse_reentrant(model: nn.Module) -> None:
    """Raise ``OptionError`` if layers of ``model`` are to be called in reentrant gradient checkpointing."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True and _is_reentrant(module):
            raise OptionError(f"{type(model).__name__}: {_CHECKPOINT}")


def refuse_hooked_images(images: list[Image], model: nn.Module) -> None:
    """Raise ``OptionError`` if a module that several stages have images of does more than its ``forward``."""
    names = {id(module): name for name, module in model.named_modules()}
    for original in [image.original for image in images]:
        if has_hooks(original) or "forward" in vars(original):
            what = names[id(original)]
            raise OptionError(
                f"{f'submodule {what!r}' if what else 'the model'} has hooks, is compiled or has another forward than "
                "its class, and is in parts on several stages, each of which would call it; register hooks on its "
                "layers, and compile with the pipeline's options"
            )


def _of_config(model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    for name, value in _OUTPUTS.items():
        if getattr(config, name, None) is value and not ("router" in name and has_router_loss(model)):
            yield f"config.{name} is {value}, and a pipeline returns {_instead(name)}; set it to {not value}"
    if getattr(config, "apply_spec_augment", False) and getattr(config, "mask_time_prob", 0):
        yield (
            "SpecAugment draws from numpy, which a recomputation would not repeat; set config.apply_spec_augment to "
            "False and mask the features before you call the pipeline"
        )


def _instead(name: str) -> str:
    return "no auxiliary loss of routers" if "router" in name else "the model's output by name, with the logits alone"


def _of_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        where = f"submodule {name!r}" if name else "the model"
        if _drops_layers(module):
            yield (
                f"{where} leaves out layers at random (LayerDrop), by numbers that a recomputation would not repeat "
                "and that other stages do not know; set layerdrop to 0.0 in the config before the model is made"
            )


def _drops_layers(module: nn.Module) -> bool:
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    values = [getattr(where, name, 0) for where in (module, getattr(module, "config", None)) for name in names]
    return any(isinstance(value, float) and value > 0 for value in values)


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    # Until version 5, torch's own default.
    return not isinstance(function, partial) or function.keywords.get("use_reentrant", True) is not False
