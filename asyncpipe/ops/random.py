"""Random streams of tasks: the same draws whatever the threads do, and again when recomputing.

torch's default generators are global: two stages that draw at the same time would race for them, and a
recomputation that rewinds them would rewind them for everybody. So every micro-batch has a stream of its own
at every stage, seeded by (step seed, micro-batch, stage). While a task runs, a function mode (thread-local)
recognises the torch functions that draw; each of them runs under a lock with the default generators set to
the task's stream, and set back behind it.

The contract: a step takes one number from the caller's default CPU generator. Draws depend on that number, on
the micro-batch and on the stage; not on schedule, device, thread or recomputation. They are not those of the
unsplit model. Python's ``random``, numpy and custom kernels with generators of their own are not replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["RandomStream", "draw_step_seed"]

_lock = threading.RLock()

# Functions that always draw. Those of aten are the ones that it tags as `nondeterministic_seeded`.
_DRAWS_TEXT = """
    alpha_dropout bernoulli binomial cauchy dropout dropout1d dropout2d dropout3d exponential feature_alpha_dropout
    feature_dropout fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices geometric gumbel_softmax log_normal multinomial native_dropout normal poisson
    rand rand_like randint randint_like randn randn_like random randperm rrelu rrelu_with_noise _sample_dirichlet
    _standard_gamma uniform
"""
_DRAWS = frozenset(name + suffix for name in _DRAWS_TEXT.split() for suffix in ("", "_"))

# Functions that draw only where they are told to drop something, and that are too long to hold the lock for nothing.
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_ATTENTION_DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}


def draw_step_seed() -> int:
    """A number from the caller's default CPU generator: the root of all draws of one step."""
    return int(torch.randint(0, 2**62, ()).item())


class RandomStream(TorchFunctionMode):
    """The draws of one micro-batch at one stage, as a context for the thread that runs the task."""

    def __init__(self, step_seed: int, microbatch: int, stage: int, device: torch.device) -> None:
        super().__init__()
        self._seed = _mix(_mix(step_seed, microbatch), stage)
        self._device = device
        self._states: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _may_draw(func, args, kwargs):
            return func(*args, **kwargs)
        with _lock:
            generators = self._generators()
            outside = [generator.get_state() for generator in generators]
            if not self._states:
                self._states = [torch.Generator(g.device).manual_seed(self._seed).get_state() for g in generators]
            _set_states(generators, self._states)
            try:
                return func(*args, **kwargs)
            finally:
                self._states = [generator.get_state() for generator in generators]
                _set_states(generators, outside)

    def _generators(self) -> list[torch.Generator]:
        """The default generators that a task on this device can draw from; their states live on the host."""
        if self._device.type == "cuda":
            return [torch.default_generator, torch.cuda.default_generators[self._device.index]]
        return [torch.default_generator]


def _may_draw(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _DRAWS:
        return True
    if name in _RECURRENT:
        return any(isinstance(value, float) and value > 0 for value in args)
    if name in _ATTENTION_DROPOUT:
        position = _ATTENTION_DROPOUT[name]
        probability = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
        return bool(probability > 0)
    return False


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _mix(seed: int, index: int) -> int:
    """A 63-bit seed for branch ``index`` of ``seed``: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & 0x7FFFFFFFFFFFFFFF
