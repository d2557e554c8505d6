"""Hooks on modules and parameters. They change what passes, so that a lost or doubled call shows, and are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from asyncpipe import is_recomputing

MODULE_HOOKS = ("forward", "forward pre", "backward", "backward pre", "look")
PARAMETER_HOOKS = ("clamp", "scale", "post accumulate", "update in backward")


def _scaled(value: Any, factor: float) -> Any:
    def scaled(tensor: Tensor) -> Tensor:
        return tensor * factor if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, scaled, value)


class HookCalls:
    """Installs hooks, and counts their calls by (layer, hook): those of recomputations apart."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, bool]] = []  # Appending is atomic; stages run on several threads.

    def counted(self, recomputing: bool) -> dict[str, int]:
        """The number of calls by the name of the hook; of recomputations, or else of all others."""
        return dict(Counter(name for name, again in list(self._calls) if again == recomputing))

    def _called(self, name: str) -> None:
        self._calls.append((name, is_recomputing()))

    def on_module(self, name: str, module: nn.Module, hook: str) -> None:
        """Install a hook of ``MODULE_HOOKS``."""
        name = f"{name}: {hook}"

        def forward(module: nn.Module, args: Any, output: Any) -> Any:
            self._called(name)
            return _scaled(output, 0.9) if hook == "forward" else None

        def forward_pre(module: nn.Module, args: Any) -> Any:
            self._called(name)
            return _scaled(args, 1.1)

        def backward(module: nn.Module, gradient_in: Any, gradient_out: Any) -> Any:
            self._called(name)
            return tuple(None if g is None else g * 0.8 for g in gradient_in)

        def backward_pre(module: nn.Module, gradient_out: Any) -> Any:
            self._called(name)
            return tuple(None if g is None else g * 1.2 for g in gradient_out)

        match hook:
            case "forward" | "look":
                module.register_forward_hook(forward)
            case "forward pre":
                module.register_forward_pre_hook(forward_pre)
            case "backward":
                module.register_full_backward_hook(backward)
            case "backward pre":
                module.register_full_backward_pre_hook(backward_pre)

    def on_parameters(self, name: str, module: nn.Module, hook: str) -> list[Any]:
        """Install a hook of ``PARAMETER_HOOKS`` on all parameters to train; the handles."""
        trained = [(key, p) for key, p in module.named_parameters() if p.requires_grad]
        return [self._on_parameter(f"{name}.{key}: {hook}", p, hook) for key, p in trained]

    def _on_parameter(self, name: str, parameter: nn.Parameter, hook: str) -> Any:
        # Behind a function that gives a parameter no gradient, torch calls hooks with None.
        def changed(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            self._called(name)
            if hook == "scale" or gradient.is_sparse or gradient.is_complex():
                return gradient * 0.5
            return gradient.clamp(-0.05, 0.05)

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            self._called(name)
            if hook == "post accumulate":
                parameter.grad.mul_(0.5)
                return
            with torch.no_grad():
                parameter.sub_(0.05 * parameter.grad)
            parameter.grad = None

        if hook in ("clamp", "scale"):
            return parameter.register_hook(changed)
        return parameter.register_post_accumulate_grad_hook(accumulated)
