"""The arguments that a model was traced with, and the check that those of a later call fit them."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.errors import AsyncpipeError, BatchError, TraceError
from asyncpipe.ops.model.microbatch import Arguments, NoChunk, without_no_chunk
from asyncpipe.ops.model.nested import flatten, places, rebuild

__all__ = ["DYNAMIC", "TraceInputs", "dynamic_sizes"]

DYNAMIC = ("auto", "batch", "all")
"""Which sizes of arguments may differ from the example's; ``trace`` explains them."""


class TraceInputs:
    """The arguments that a model was traced with: binds those of a call to them, and checks that they fit."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self._model = type(model).__name__
        self._signature = inspect.signature(model.forward)
        self._names: list[str] = []
        try:
            bound = self._bind(arguments)
        except TypeError as error:
            raise TraceError(f"the example does not fit {self._model}.forward: {error}") from error
        named = _named(bound, TraceError)
        # Not the example itself, which may be large: types and sizes are enough.
        self._values = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in named.values()]
        self._names = list(named)
        self._structure = flatten(bound, wraps=(NoChunk,), error=TraceError)[1]
        self._tensors = [i for i, value in enumerate(self._values) if isinstance(value, Tensor)]
        if not self._tensors:
            raise TraceError("the example has no tensor; give the arguments that the model is called with")
        self.guards: dict[bool, Callable[..., Any]] = {}
        """By mode (whether training): a check of the tensors' sizes, which raises ``AssertionError``."""

    def example(self, arguments: Arguments) -> list[Tensor]:
        """The tensors of a call, contiguous and each a new object, so that the export does not confuse them."""
        leaves = _named(self._bind(arguments), TraceError).values()
        return [x.detach().contiguous() for x in leaves if isinstance(x, Tensor)]

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the model as in the example, with other tensors."""
        values = list(self._values)
        for i, tensor in zip(self._tensors, tensors, strict=True):
            values[i] = tensor
        bound = self._signature.bind_partial()
        bound.arguments.update(rebuild(self._structure, values))
        return model(*bound.args, **bound.kwargs)

    def tensors(self, arguments: Arguments, training: bool) -> list[Tensor]:
        """The tensors of a call, in the order of the trace. Raises ``BatchError`` if the call does not fit."""
        try:
            given = _named(self._bind(arguments), BatchError)
        except TypeError as error:
            raise BatchError(f"the arguments do not fit {self._model}.forward: {error}") from error
        missing = [name for name in self._names if name not in given]
        extra = [name for name in given if name not in self._names]
        if missing or extra:
            told = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
            raise BatchError(f"the arguments are not those of the trace: {' and '.join(told)}")
        values = [given[name] for name in self._names]
        for name, value, traced in zip(self._names, values, self._values, strict=True):
            _check_value(name, value, traced)
        tensors = [values[i] for i in self._tensors]
        try:
            # Only sizes are checked. Strides may differ, since operations read them when they run.
            self.guards[training](*(torch.empty(tensor.shape, device="meta") for tensor in tensors))
        except AssertionError as error:
            condition = str(error).removeprefix("Guard failed: ")
            leaf = r"leaves[_\[](\d+)\]?"
            condition = re.sub(leaf, lambda found: self._names[self._tensors[int(found[1])]], condition)
            raise BatchError(
                f"the micro-batch has sizes that the trace is not for, which is for {condition}; trace with an example "
                "like it, of at least two samples, or with dynamic='all', or keep the model's code from depending on "
                "sizes"
            ) from error
        return tensors

    def _bind(self, arguments: Arguments) -> dict[str, Any]:
        if len(arguments.args) == 1 and not arguments.kwargs and self._are_keywords(arguments.args[0]):
            arguments = Arguments((), arguments.args[0])
        bound = self._signature.bind(*arguments.args, **arguments.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _are_keywords(self, given: Any) -> bool:
        """Whether ``given`` is a dict of arguments by name, where the model was not traced with a dict."""
        first = next(iter(self._signature.parameters), None)
        return (
            type(given) is dict
            and bool(self._names)
            and given.keys() <= self._signature.parameters.keys()
            and not any(name.startswith(f"{first}[") for name in self._names)
        )


def dynamic_sizes(example: Sequence[Tensor], dynamic: str, batch_dim: int) -> tuple[dict[int, Any], ...]:
    """For each tensor, which of its sizes may differ, as ``torch.export`` takes it; ``trace`` explains ``dynamic``."""
    dims = torch.export.Dim
    chosen: list[dict[int, Any]] = []
    for tensor in example:
        every = dynamic == "all" or (dynamic == "auto" and tensor.dim() < _IMAGE)
        # A size of 1 is always fixed, since it is broadcast; torch would log a warning for a variable one.
        chosen.append(
            {k: dims.AUTO if n > 1 and (every or k == batch_dim) else dims.STATIC for k, n in enumerate(tensor.shape)}
        )
    return tuple(chosen)


_IMAGE = 4
"""Tensors with so many dimensions are images, videos or their latents, which keep their sides."""


def _named(bound: dict[str, Any], error: type[AsyncpipeError]) -> dict[str, Any]:
    """The leaves of bound arguments by their place: ``mask``, ``batch['ids']``, ``states[0]``, ``output.loss``."""
    found: dict[str, Any] = {}
    for name, value in bound.items():
        leaves, structure = flatten(value, wraps=(NoChunk,), error=error)
        found.update(zip((name + place for place in places(structure)), map(without_no_chunk, leaves), strict=True))
    return found


def _check_value(name: str, value: Any, traced: Any) -> None:
    again = "trace again with an example that has it"
    if isinstance(value, Tensor) and isinstance(traced, Tensor):
        if (value.dtype, value.dim()) != (traced.dtype, traced.dim()):
            raise BatchError(
                f"{name} is a tensor of {value.dtype} with {value.dim()} dimensions, but was traced as one of "
                f"{traced.dtype} with {traced.dim()}; {again}"
            )
    elif isinstance(value, Tensor) or isinstance(traced, Tensor):
        now, then = ("a tensor" if isinstance(x, Tensor) else reprlib.repr(x) for x in (value, traced))
        raise BatchError(f"{name} is {now}, but was traced as {then}; {again}")
    elif value is not traced and (type(value) is not type(traced) or value != traced):
        raise BatchError(
            f"{name} is {reprlib.repr(value)}, but was traced as {reprlib.repr(traced)}, which is now part of the "
            f"stages; {again}"
        )
