"""A model that accelerate has dispatched (``device_map=``): where its layers are, and its hooks, which are taken off.

Such a model runs one device at a time: each hook moves what its module is called with. As a pipeline, the device map is
the cut, weights stay where they are, and what travels is copied by tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.stage import StagedModel

__all__ = ["device_runs", "take_off_hooks", "unfit_hooks"]


def unfit_hooks(model: nn.Module) -> Iterator[str]:
    """What in accelerate's hooks on ``model`` cannot be taken off without a loss, in words with what to do."""
    for name, module in model.named_modules():
        hook = vars(module).get("_hf_hook")
        where = f"submodule {name!r}" if name else "the model"
        for each in getattr(hook, "hooks", (hook,)) if hook is not None else ():
            if getattr(each, "offload", False):
                yield (
                    f"{where} is offloaded to the CPU or the disk by its device_map, and has no weights between two "
                    "calls; load the model with a device_map of accelerators alone (more of them, fewer bits, or "
                    "max_memory without 'cpu'), or without one, and let the pipeline offload activations and "
                    "optimizers (offload=, optimizer_on_host=True)"
                )
            elif type(each).__name__ != "AlignDevicesHook":
                yield (
                    f"{where} has a {type(each).__name__} of accelerate, which does more than a device_map asks for; "
                    "call accelerate.hooks.remove_hook_from_module(model, recurse=True) if it can do without"
                )


def take_off_hooks(module: nn.Module) -> None:
    """Leave ``module`` as it was before accelerate dispatched it. Parameters stay where they are."""
    for part in [part for part in module.modules() if "_hf_hook" in vars(part)]:
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(part)
        # The class has it; images of the module would call that of the module itself.
        if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
            del part.forward


def device_runs(staged: StagedModel) -> tuple[list[str], list[int]]:
    """The devices of consecutive stages of a dispatched model, and how many stages are on each.

    A parameter that several stages use counts for the first one. A device that comes back later is listed again. Raises
    ``OptionError`` for a model that is not dispatched, or is on one device alone.
    """
    roots: list[Any] = [part for part in staged.module.modules() if "hf_device_map" in vars(part)]
    names = {id(parameter): name for name, parameter in roots[0].named_parameters()} if roots else {}
    seen: set[int] = set()
    devices: list[str] = []
    for stage in staged.stages:
        sizes: Counter[str] = Counter()
        for parameter in stage.parameters():
            if id(parameter) in names and id(parameter) not in seen:
                where = _device(roots[0].hf_device_map, names[id(parameter)], parameter.device)
                sizes[where] += parameter.numel()
                seen.add(id(parameter))
        devices.append(max(sizes, key=sizes.__getitem__) if sizes else devices[-1] if devices else "")
    runs = [(device, sum(1 for _ in same)) for device, same in groupby(devices)]
    if len(runs) < 2:
        where = f"is on {runs[0][0]} alone" if roots else "was loaded without a device_map"
        raise OptionError(f"the model {where}, which says of no cut; give devices=, for instance ['cuda:0', 'cuda:1']")
    return [device for device, _ in runs], [count for _, count in runs]


def _device(device_map: Mapping[str, Any], name: str, device: torch.device) -> str:
    """The device of a parameter; on CPUs, where tensors know of one alone, that of the map."""
    if device.type != "cpu":
        return str(device)
    entries = [entry for entry in device_map if not entry or name == entry or name.startswith(f"{entry}.")]
    return str(device_map[max(entries, key=len)]) if entries else "cpu"
