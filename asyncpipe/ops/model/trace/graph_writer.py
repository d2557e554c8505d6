"""Writes parts of a traced graph as graphs of their own, which can run on another device than the traced one.

Where an operation was traced with the model's device (``torch.arange(n, device=ids.device)``), its copy takes the
device from the graph's first argument. A part of the forward under ``torch.no_grad`` or ``torch.autocast`` is one
operation in a trace, which runs an inner graph in that mode. Here it becomes a submodule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from asyncpipe.ops.torch_internals import is_metadata_check

__all__ = ["GraphWriter"]


class GraphWriter:
    """Copies nodes into a new graph, whose first argument is the device to use instead of the traced one.

    The graphs of torch's own operations (``torch.cond``) cannot take that argument, and keep the traced device.
    """

    def __init__(self, device: torch.device, takes_device: bool = True) -> None:
        self.graph = fx.Graph()
        self.known: dict[fx.Node, fx.Node] = {}
        """The new node for each node of the trace."""
        self._traced_device = device
        self._device: Any = self.graph.placeholder("stage_device") if takes_device else device
        self._root = nn.Module()

    def copy(self, node: fx.Node, root: nn.Module) -> None:
        """Append a copy of an operation."""
        found = _REGIONS.get(getattr(node.target, "__name__", ""))
        if found is not None:
            context, count = found
            inner = root.get_submodule(str(node.args[count].target))  # type: ignore[union-attr]
            region = _Region(context, node.args[:count], self._traced_device, _write_inner(inner, self._traced_device))
            values = self._map(node.args[count + 1 :], root)
            self.known[node] = self.graph.call_module(self._add(node, region), (self._device, *values))
        else:
            arguments, options = self._map(node.args, root), self._map(node.kwargs, root)
            self.known[node] = self.graph.call_function(node.target, arguments, options)  # type: ignore[arg-type]

    def _add(self, node: fx.Node, module: nn.Module) -> str:
        name = f"inner_{node.name}"
        self._root.add_module(name, module)
        return name

    def stand_in(self, value: Any) -> Any:
        """The new node for a node of the trace; any other value itself."""
        return self.known[value] if isinstance(value, fx.Node) else value

    def finish(self, output: Any, name: str) -> fx.GraphModule:
        """The graph as a module."""
        self.graph.output(output)
        return fx.GraphModule(self._root, self.graph, name)

    def _map(self, arguments: Any, root: nn.Module) -> Any:
        """``arguments`` with the new nodes, inner graphs and device in place of the traced ones."""

        def replace(argument: Any) -> Any:
            if isinstance(argument, torch.device) and argument.type == self._traced_device.type:
                return self._device
            if isinstance(argument, fx.Node) and argument not in self.known:
                inner = root.get_submodule(str(argument.target))
                inner = _write_inner(inner, self._traced_device, takes_device=False)
                self.known[argument] = self.graph.get_attr(self._add(argument, inner))
            return self.stand_in(argument)

        return map_aggregate(arguments, replace)


class _Region(nn.Module):
    """Runs an inner graph in a context. A module, since torch.fx can pickle calls of modules."""

    def __init__(
        self,
        context: Callable[..., AbstractContextManager[Any]],
        options: tuple[Any, ...],
        traced_device: torch.device,
        graph: fx.GraphModule,
    ) -> None:
        super().__init__()
        self._context = context
        self._options = options
        self._traced_device = traced_device
        self.graph = graph

    def forward(self, device: torch.device, *values: Any) -> Any:
        # Autocast takes a type of device: use that of the stage in place of the traced one.
        options = [device.type if option == self._traced_device.type else option for option in self._options]
        with self._context(*options):
            return self.graph.forward(device, *values)


def _autocast(device_type: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None) -> torch.autocast:
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)


_REGIONS: dict[str, tuple[Callable[..., AbstractContextManager[Any]], int]] = {
    "wrap_with_set_grad_enabled": (torch.set_grad_enabled, 1),
    "wrap_with_autocast": (_autocast, 4),
}
"""By operation: the context in which it runs its graph, and how many of its arguments (options) precede the graph.

By name, since torch makes these operations at the first trace only.
"""


def _write_inner(inner: nn.Module, device: torch.device, takes_device: bool = True) -> fx.GraphModule:
    writer = GraphWriter(device, takes_device)
    for node in inner.graph.nodes:  # type: ignore[union-attr]
        if node.op == "placeholder":
            writer.known[node] = writer.graph.placeholder(node.name)
        elif node.op == "call_function" and not is_metadata_check(node):
            writer.copy(node, inner)
    output = inner.graph.output_node().args[0]  # type: ignore[union-attr,operator]
    return writer.finish(map_aggregate(output, writer.stand_in), "Inner")
