"""Random streams of tasks: the same draws on any thread, in any order, and again in a recomputation.

torch's default generators are global. Two stages that draw at the same time would race for them, and a recomputation
that rewinds them would rewind them for every thread. So every micro-batch has its own generators at every stage, seeded
by (step seed, micro-batch, stage). While a task runs, a thread-local function mode recognises the torch functions that
draw, and passes them these generators. Functions that take no generator run under a lock: the default generators are
set to the task's state before, and set back after.

Guarantees: a step takes one number from the pipeline's CPU generator (torch's default one unless the pipeline has its
own). Draws depend on that number, the micro-batch and the stage, and not on schedule, device, thread or recomputation.

Limits: the draws are not those of the unsplit model. Python's ``random``, numpy, and custom kernels with their own
generators are not repeated by a recomputation. Other threads may draw from the default generators while a step runs,
but not *during* a function that takes no generator (CUDA dropout, recurrent layers and attention with dropout,
``rrelu`` …): each would change the draws of the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from asyncpipe.core.splitmix import branch_seed
from asyncpipe.errors import RecomputeError
from asyncpipe.ops.device.devices import ACCELERATORS

__all__ = ["RandomStream", "draw_step_seed"]

_lock = threading.RLock()

# Functions that take a generator.
_TAKES_GENERATOR = frozenset(
    """
    bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ kaiming_uniform_ log_normal_ multinomial normal
    normal_ poisson rand randint randn random_ randperm uniform_
    """.split()
)
# Functions that always draw and take no generator. The two sets are all that aten tags as `nondeterministic_seeded`.
_DRAWS = frozenset(
    """
    cauchy exponential fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices geometric gumbel_softmax log_normal rand_like randint_like randn_like random
    rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ _sample_dirichlet _standard_gamma uniform
    """.split()
)
# Functions that draw only if they drop anything. Arguments: input, probability, training.
_DROPOUTS = frozenset(
    """
    alpha_dropout alpha_dropout_ dropout dropout_ dropout1d dropout2d dropout3d feature_alpha_dropout
    feature_alpha_dropout_ feature_dropout feature_dropout_ native_dropout
    """.split()
)
# Functions with dropout inside; for attention, the position of the probability among the arguments.
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_ATTENTION_DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}


def draw_step_seed(generator: torch.Generator | None = None) -> int:
    """A seed for all draws of one step, drawn from ``generator`` (torch's default CPU generator if there is none)."""
    return int(torch.randint(0, 2**62, (), generator=generator).item())


class RandomStream(TorchFunctionMode):
    """The draws of one micro-batch at one stage: a context for the thread that runs the task."""

    def __init__(self, step_seed: int, microbatch: int, stage: int, device: torch.device) -> None:
        super().__init__()
        self._seed = branch_seed(branch_seed(step_seed, microbatch), stage)
        self._device = device
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The name of an operator in a traced stage includes its overload: dropout.default.
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _TAKES_GENERATOR:
            _refuse_torch_checkpoint()
            if kwargs.get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator(_device_of(args, kwargs))}
            return func(*args, **kwargs)
        if not _draws(name, args, kwargs):
            return func(*args, **kwargs)
        _refuse_torch_checkpoint()
        if func in (functional.dropout, torch.ops.aten.dropout.default) and args and args[0].device.type == "cpu":
            return self._dropout(*args, **kwargs)
        return self._with_default_generators(func, args, kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``functional.dropout`` as aten computes it on a CPU, with this stream's generator."""
        if not 0 < p < 1:
            return functional.dropout(x, p, training, inplace)
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=self._generator(x.device)).div_(1 - p)
        return x.mul_(noise) if inplace else x * noise

    def _with_default_generators(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that uses the default generators, which have the state of this stream's meanwhile.

        States are on the host, also those of CUDA generators, so nothing waits for the device.
        """
        defaults = [torch.default_generator]
        if self._device.type != "cpu":
            defaults.append(torch.get_device_module(self._device).default_generators[self._device.index])
        own = [self._generator(default.device) for default in defaults]
        with _lock:
            outside = [default.get_state() for default in defaults]
            for default, generator in zip(defaults, own, strict=True):
                default.set_state(generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                for default, generator, state in zip(defaults, own, outside, strict=True):
                    generator.set_state(default.get_state())
                    default.set_state(state)


def _draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name in _DRAWS:
        return True
    if name in _DROPOUTS:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(training and probability > 0)
    if name in _RECURRENT:
        return any(isinstance(value, float) and value > 0 for value in args)
    if name in _ATTENTION_DROPOUT:
        position = _ATTENTION_DROPOUT[name]
        probability = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
        return bool(probability > 0)
    return False


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """The device that a function draws on: its ``device``, else that of its first tensor, else the default device."""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type not in ACCELERATORS or device.index is not None:
            return device
        return torch.device(device.type, torch.get_device_module(device).current_device())
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    first = next(tensors, None)
    return torch.get_default_device() if first is None else first.device


def _refuse_torch_checkpoint() -> None:
    """Raise if a draw is inside ``torch.utils.checkpoint``, which rewinds the default generators and not these."""
    if not torch.is_grad_enabled():
        return
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise RecomputeError(
                "a stage draws random numbers (dropout?) inside torch.utils.checkpoint, which cannot repeat them here; "
                "recompute with the pipeline's own checkpoint=, or do not draw inside torch's"
            )
        frame = frame.f_back
