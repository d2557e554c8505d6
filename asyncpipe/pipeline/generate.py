"""``pipe.generate``: transformers' own ``generate``, whose forwards are those of the stages.

Each micro-batch of requests has a loop of ``generate`` on a thread of its own, which stops wherever it calls the model.
When all have stopped, one ``pipe(x)`` runs their forwards, a micro-batch each, so that they fill the stages. Only one
loop runs at a time, in the order of the micro-batches, so that draws are the same every time::

    loop 0   ──choose──┐                      ┌──choose──┐
    loop 1             └──choose──┐           │          └──choose──┐
    stages                        └── F F F ──┘                     └── F F F ──
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe.errors import BatchError, OptionError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.model.evaluation import evaluating
from asyncpipe.ops.model.microbatch import Arguments, Microbatches, cut, keywords
from asyncpipe.ops.model.transformers.generation import TURN, CacheTurn
from asyncpipe.ops.model.transformers.layer_stage import LayerStage
from asyncpipe.pipeline.build import PipelineParts

__all__ = ["Generation"]

_OTHERS = "return_dict_in_generate streamer assistant_model past_key_values prompt_lookup_num_tokens custom_generate"


class Generation:
    """The tokens of a call of ``pipe.generate``. Checked when it is made; made and called on any thread."""

    def __init__(
        self, parts: PipelineParts, call: Callable[[Any], Any], inputs: Any, options: Mapping[str, Any]
    ) -> None:
        """``call`` is the pipeline's."""
        self._call, self._parts = call, parts
        module: Any = parts.module
        self._model: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
        _check(parts, self._model, options)
        batch: Any = keywords(inputs)
        if isinstance(batch, Arguments):
            batch = batch.kwargs or batch.args[0]
        if isinstance(batch, Tensor):
            batch = {self._model.main_input_name: batch}
        if not isinstance(batch, Mapping):
            raise BatchError(f"generate takes token ids or a tokenizer's batch, got {type(inputs).__name__}")
        self._pieces = cut(dict(batch), parts.options.microbatches).pieces
        self._options = dict(options)
        self._context = CallerContext.capture()
        self._streams = [torch.accelerator.current_stream(d) for d in _accelerators(parts)]
        self._is_cancelled = Event()

    def cancel(self) -> None:
        """Have the call end before its next token."""
        self._is_cancelled.set()

    def elsewhere(self) -> Tensor:
        """As ``tokens``, on another thread than that of the caller."""
        self._follow_streams()
        return self.tokens()

    def tokens(self) -> Tensor:
        """Generate; blocks. In evaluation mode, which is left as it was found."""
        loops = [_Loop(partial(self._generate, piece)) for piece in self._pieces]
        try:
            with evaluating(self._parts.module), self._context.entered(), torch.no_grad():
                self._run(loops)
            return torch.empty(0) if self._is_cancelled.is_set() else self._joined([loop.result for loop in loops])
        finally:
            for loop in loops:
                loop.end()

    def _run(self, loops: Sequence[_Loop]) -> None:
        for loop in loops:
            loop.go_on(None)
        while busy := [loop for loop in loops if loop.asked is not None]:
            if self._is_cancelled.is_set():
                return
            # The seed of the step is not one of the draws that a caller sees.
            with torch.random.fork_rng(devices=()):
                outputs = self._call(Microbatches([Arguments((), loop.asked or {}) for loop in busy]))
            for loop, output in zip(busy, outputs, strict=True):
                loop.go_on(output)

    def _generate(self, piece: Mapping[str, Any], ask: Callable[[dict[str, Any]], Any]) -> Tensor:
        """The loop of a micro-batch of requests, on its thread."""
        self._follow_streams()
        model = copy(self._model)
        model.forward = wraps(self._model.forward)(_Forward(ask))
        if getattr(model.config, "is_encoder_decoder", False):
            encoder = copy(self._model.get_encoder())
            encoder.forward = wraps(encoder.forward)(partial(_encode, ask, self._model))
            model.get_encoder = lambda *_, **__: encoder
        tokens: Tensor = model.generate(**piece, **self._options)
        return tokens

    def _follow_streams(self) -> None:
        for stream in self._streams:
            # Hazard: the stages' work is ordered with that of the caller's streams, and of no others.
            torch.accelerator.set_stream(stream)

    def _joined(self, tokens: Sequence[Tensor]) -> Tensor:
        longest = max(each.shape[1] for each in tokens)
        config = self._options.get("generation_config") or self._model.generation_config
        ends = [self._options.get(name, getattr(config, name, None)) for name in ("pad_token_id", "eos_token_id")]
        pad: Any = next((end for end in ends if end is not None), 0)
        pad = pad[0] if isinstance(pad, Sequence) else pad
        return torch.cat([functional.pad(each, (0, longest - each.shape[1]), value=int(pad)) for each in tokens])


def _check(parts: PipelineParts, model: Any, options: Mapping[str, Any]) -> None:
    """Raise ``OptionError`` for what generates nothing, or nothing that is right."""
    name = type(model).__name__
    stages = parts.staged.stages
    if not hasattr(model, "generate") or not all(isinstance(stage, LayerStage) for stage in stages):
        raise OptionError(
            f"generate needs a model of transformers that generates and is cut by its structure, and {name} is not; "
            "call generate on the model itself"
        )
    if parts.options.replicas > 1 or parts.options.compile:
        raise OptionError(
            "generate keeps caches in stages, which must not be compiled nor have replicas; leave compile and replicas "
            "out, or call generate on the model itself"
        )
    for option in _OTHERS.split():
        if options.get(option) or getattr(options.get("generation_config"), option, None):
            raise OptionError(f"generate of a pipeline returns tokens of a loop of its own; leave {option} out")
    if (kind := options.get("cache_implementation")) not in (None, "dynamic"):
        raise OptionError(f"the caches of stages are dynamic ones; leave cache_implementation={kind!r} out")


def _accelerators(parts: PipelineParts) -> list[torch.device]:
    return list({stage.device.physical for stage in parts.resources.stages if stage.device.is_accelerator})


class _Loop:
    """A function on a thread that runs only between ``go_on`` and the next question that it asks."""

    def __init__(self, function: Callable[[Callable[[dict[str, Any]], Any]], Tensor]) -> None:
        self.asked: dict[str, Any] | None = None
        """What it wants to know; ``None`` if it is over."""
        self.result: Any = None
        self._function = function
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._turns: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="asyncpipe generate", daemon=True)
        self._thread.start()

    def go_on(self, answer: Any) -> None:
        """Answer, and wait until it asks again or ends; raises what it has raised."""
        self.asked = None
        self._answers.put(answer)
        if (error := self._turns.get()) is not None:
            raise error

    def end(self) -> None:
        """End the thread, wherever it is."""
        self._answers.put(_NobodyWaits())
        self._thread.join()

    def _ask(self, request: dict[str, Any]) -> Any:
        self.asked = request
        self._turns.put(None)
        return self._answered()

    def _answered(self) -> Any:
        answer = self._answers.get()
        if isinstance(answer, _NobodyWaits):
            raise answer
        return answer

    def _work(self) -> None:
        try:
            self._answered()
            self.result = self._function(self._ask)
        except _NobodyWaits:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the loop is waited for
            self._turns.put(error)
        else:
            self._turns.put(None)


class _NobodyWaits(BaseException):
    """Nobody waits for the loop any more."""


class _Forward:
    """The forward of the model that ``generate`` calls: asks for that of the stages."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any]) -> None:
        self._ask = ask
        self._turn = CacheTurn(None)

    def __call__(self, **inputs: Any) -> Any:
        """The output, with the cache that was given."""
        cache = inputs.pop("past_key_values", None)
        if cache is not self._turn.cache:
            if cache.get_seq_length():
                raise OptionError("generate goes on with another cache than it began with, which stages do not know")
            self._turn = CacheTurn(cache)
        encoded = inputs.pop("encoder_outputs", None)
        given = {name: x for name, x in inputs.items() if x is not None and name not in ("use_cache", "return_dict")}
        given |= {TURN: self._turn.number} | ({} if encoded is None else {"encoded": encoded[0]})
        output = self._ask(given)
        if cache is not None:
            output["past_key_values"] = cache
        return output


def _encode(ask: Callable[[dict[str, Any]], Any], model: nn.Module, *args: Any, **inputs: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    given = {str(model.main_input_name): value for value in args} | inputs
    given = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    turn = CacheTurn(None, encodes=True)
    return BaseModelOutput(last_hidden_state=ask(given | {TURN: turn.number})["last_hidden_state"])
