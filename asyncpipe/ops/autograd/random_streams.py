"""Random streams of tasks: the same draws on any thread, in any order, and again in a recomputation.

torch's default generators are global. Two stages that draw at the same time would race for them, and a recomputation
that rewinds them would rewind them for every thread. So every micro-batch has its own stream at every stage, seeded by
(step seed, micro-batch, stage), which its tasks enter while they run:

- On a CPU, whatever draws on the task's thread draws from a generator of the stream (``own_draws``). Tasks do not wait
  for each other. Those of a device share what they enter (``DeviceDraws``), which goes from stream to stream, so a task
  that draws nothing pays for a number.
- On an accelerator, the task seeds the device's default generator, while no other task is issued to that device
  (``ops/device/generator_turns``). Whether it will draw is not known before: kernels of extensions and replays of CUDA
  graphs draw as well, and ``torch.utils.checkpoint`` sets the generator back. Seeding takes a microsecond.

``torch.utils.checkpoint`` inside a stage keeps and sets the state of the stream, in a backward that of the backward's.

Guarantees: a step takes one number from the pipeline's CPU generator (torch's default one unless the pipeline has its
own). Draws depend on that number, the micro-batch and the stage, and not on schedule, device, thread or recomputation.

Limits: the draws are not those of the unsplit model. Not replayed are Python's ``random``, numpy, threads that a stage
starts by itself, kernels of extensions that use torch's CPU generator without its operators, and draws inside a
``__torch_dispatch__``. CPUs and accelerators draw different numbers from the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor

from asyncpipe.core.splitmix import branch_seed
from asyncpipe.errors import RecomputeError
from asyncpipe.ops.autograd.own_draws import OwnDraws, own_draws
from asyncpipe.ops.device.devices import ACCELERATORS
from asyncpipe.ops.device.generator_turns import GeneratorTurn, turn_of

__all__ = [
    "DeviceDraws",
    "RandomStream",
    "check_repeated",
    "device_draws",
    "draw_step_seed",
    "random_stream",
    "turns_paused",
]

_CPU = torch.device("cpu")
_NOTHING = nullcontext()


def draw_step_seed(generator: torch.Generator | None = None) -> int:
    """A seed for all draws of one step, drawn from ``generator`` (torch's default CPU generator if there is none)."""
    return int(torch.randint(0, 2**62, (), generator=generator, device="cpu").item())


class RandomStream(OwnDraws):
    """The draws of one task of a micro-batch at a stage: a context for the thread that runs it, entered once.

    ``branch`` is 0 for forwards and recomputations. Other tasks have other numbers.
    """

    __slots__ = ("_generators", "_key")

    def __init__(self, step_seed: int, microbatch: int, stage: int, branch: int = 0) -> None:
        self._outer = []
        self._key = step_seed, microbatch, stage, branch
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def has_drawn(self) -> bool:
        """Whether anything was drawn from it so far."""
        return bool(self._generators)

    @property
    def seed(self) -> int:
        """What every generator of the stream begins from."""
        step_seed, microbatch, stage, branch = self._key
        seed = branch_seed(branch_seed(step_seed, microbatch), stage)
        return branch_seed(seed, branch) if branch else seed

    def generator(self, device: torch.device) -> torch.Generator | None:
        """A generator of the stream."""
        if device.type == "cpu":
            device = _CPU
        elif device.type not in ACCELERATORS:
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]

    def drawn(self) -> list[Tensor]:
        """Where the generators are that have drawn: equal after another run that drew the same."""
        states = []
        for device, generator in self._generators.items():
            state, unused = generator.get_state(), torch.Generator(device).manual_seed(self.seed).get_state()
            if not torch.equal(state, unused):
                states.append(state)
        return states


class _HasTurn(RandomStream):
    """The same for an accelerator: its default generator is the stream's while a task has the turn."""

    _turn: GeneratorTurn
    _has_turn = False

    def at(self, turn: GeneratorTurn) -> Self:
        """This one, after it was told where to have turns."""
        self._turn = turn
        return self

    def __enter__(self) -> Self:
        # A task inside another one, on the same thread.
        self._outer_turn = turns_paused()
        self._outer_turn.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._outer_turn.__exit__(None, None, None)

    def _take(self) -> None:
        self._begun = self._turn.acquire(self.seed)
        self._has_turn = True

    def _give(self) -> None:
        self._has_turn = False
        self._turn.release()

    def generator(self, device: torch.device) -> torch.Generator | None:
        """A generator of the stream, for other devices than the task's own."""
        return None if device == self._turn.device else super().generator(device)

    @contextmanager
    def turn_paused(self) -> Iterator[None]:
        """Let other threads draw on the accelerator, and go on afterwards from where the task was."""
        if not self._has_turn:
            yield
            return
        self._has_turn = False
        place = self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire(place)
            self._has_turn = True


class _StreamWithTurn(_HasTurn):
    """The draws of one task on an accelerator."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._take()
        return self

    def __exit__(self, *error: object) -> None:
        self._give()
        super().__exit__(*error)

    @property
    def has_drawn(self) -> bool:
        """As for a CPU, or from the default generator."""
        return super().has_drawn or not self._turn.is_at(self._begun)

    def drawn(self) -> list[Tensor]:
        """As for a CPU, with the state of the default generator."""
        return [*super().drawn(), self._turn.generator.get_state()]


class DeviceDraws(RandomStream):
    """The streams of the tasks of one device in one step: entered around all of them, and told which one begins."""

    __slots__ = ("_drew", "_is_drawing", "_step_seed")

    def __init__(self, step_seed: int, drew: set[int]) -> None:
        """``drew`` is where to note the stages that draw."""
        super().__init__(step_seed, 0, 0)
        self._step_seed = step_seed
        self._drew = drew
        self._is_drawing = False

    def during(self, microbatch: int, stage: int, branch: int = 0) -> AbstractContextManager[object]:
        """From now on, draw from this stream, from its start; the context of its task, to be entered at once."""
        self._key = self._step_seed, microbatch, stage, branch
        self._is_drawing = True
        if self._generators:
            self._generators = {}
        return _NOTHING

    def pause(self) -> None:
        """From now on, draw from the default generators: the task that begins has no micro-batch."""
        self._is_drawing = False

    def generator(self, device: torch.device) -> torch.Generator | None:
        """A generator of the stream of the task that has begun."""
        if not self._is_drawing:
            return None
        if (found := self._generators.get(device)) is not None:
            return found
        if (found := super().generator(device)) is not None:
            self._drew.add(self._key[2])
        return found


class _DeviceDrawsWithTurn(DeviceDraws, _HasTurn):
    """The same for an accelerator, at whose default generator each task has a turn."""

    def during(self, microbatch: int, stage: int, branch: int = 0) -> AbstractContextManager[object]:
        super().during(microbatch, stage, branch)
        self._take()
        return closing(self)

    def close(self) -> None:
        """The task is at its end."""
        stage = self._key[2]
        if stage not in self._drew and not self._turn.is_at(self._begun):
            self._drew.add(stage)
        self._give()


def device_draws(step_seed: int, device: torch.device, drew: set[int]) -> DeviceDraws:
    """The streams of the tasks of a logical device on ``device``. ``drew`` gets the stages that draw."""
    turn = turn_of(device)
    return DeviceDraws(step_seed, drew) if turn is None else _DeviceDrawsWithTurn(step_seed, drew).at(turn)


def random_stream(step_seed: int, microbatch: int, stage: int, device: torch.device, branch: int = 0) -> RandomStream:
    """The draws of a task on ``device``."""
    turn = turn_of(device)
    if turn is None:
        return RandomStream(step_seed, microbatch, stage, branch)
    return _StreamWithTurn(step_seed, microbatch, stage, branch).at(turn)


def turns_paused() -> AbstractContextManager[None]:
    """For what a task calls and waits for, such as a pipeline in a loss function: others may need the task's turn."""
    draws = own_draws()
    return draws.turn_paused() if isinstance(draws, _HasTurn) else _NOTHING


def check_repeated(stage: int, first: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Raise ``RecomputeError`` unless a forward and its recomputation have drawn the same."""
    if len(first) != len(again) or not all(map(torch.equal, first, again)):
        raise RecomputeError(
            f"stage {stage} drew other random numbers when it was recomputed than in its forward, so its gradients "
            "would be wrong; let what it draws depend on its input alone, or give the pipeline checkpoint='never'"
        )
