"""Prepares every step, with the mini-batch of the caller or of the pipeline's feed; counts the steps of the feed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncpipe.errors import BatchError, OptionError
from asyncpipe.ops.autograd.random_streams import draw_step_seed
from asyncpipe.ops.model.feed import Feed, FromFeed
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.remote_step import RemoteStep
from asyncpipe.pipeline.stages_here import StagesHere
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.step_inputs import NO_TARGET, CutInputs, StepInputs, StepOptions
from asyncpipe.runtime.waits import Waiting

__all__ = ["Feeding", "Step"]

Step = PreparedStep | RemoteStep


class Feeding:
    """Prepares steps, with what the caller gives them or with what the feed makes. Steps are done in their order."""

    def __init__(
        self, parts: PipelineParts, tenancy: Tenancy, stages: StagesHere, make: Callable[[StepInputs, Tenancy], Step]
    ) -> None:
        """``stages`` have what the feed makes; ``make`` makes a step of theirs."""
        self.parts = parts
        self._tenancy = tenancy
        self._stages = stages
        self._make = make
        self.steps = 0
        """How many training steps are done."""
        self._next = 0
        self._begun = 0
        """Steps from the feed that are prepared and not done."""

    @property
    def step(self) -> int:
        """The number of the first step that is not done."""
        return self._next

    @step.setter
    def step(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise OptionError(f"feed_step must be an integer of at least 0, got {number!r}")
        self._next = number

    def prepare(self, x: Any, target: Any, options: StepOptions) -> Waiting[Step]:
        """A step whose mini-batch is checked and cut. Waits for the feed.

        Raises ``BatchError`` or ``OptionError``, and what the feed's function raises; then nothing has changed.
        """
        if not isinstance(x, FromFeed):
            return self._prepared(x, target, options)
        number = self._begin(target)
        # Drawn before the feed is waited for: who draws from the same generator goes on meanwhile.
        options = replace(options, seed=draw_step_seed(self.parts.options.generator))
        made = yield from self._stages.made(number)
        return self._prepare_made(x, made, options)

    def _prepared(self, x: Any, target: Any, options: StepOptions) -> Step:
        return self._make(StepInputs.prepare(self.parts, x, target, options), self._tenancy)

    def _prepare_made(self, x: FromFeed, made: CutInputs, options: StepOptions) -> Step:
        if len(x) not in (0, sum(made.sizes)):
            raise BatchError(
                f"{self.parts.options.feed} makes a mini-batch of {sum(made.sizes)} samples, where {len(x)} are wanted"
            )
        return self._prepared(made, NO_TARGET, replace(options, is_fed=True))

    def step_done(self, step: Step) -> None:
        """The oldest step is done."""
        self.steps += step.inputs.training
        if step.inputs.options.is_fed:
            self._next += 1
            self._begun -= 1

    def give_up_prepared(self) -> None:
        """The steps that are not done will not be: the next one gets the mini-batch of the first of them."""
        self._begun = 0

    def _begin(self, target: Any) -> int:
        if not isinstance(self.parts.options.feed, Feed):
            raise OptionError("a step without a mini-batch needs a feed: give step(x, target), or the pipeline a feed=")
        if not (target is NO_TARGET or isinstance(target, FromFeed)):
            raise OptionError("a target was given without x; leave both to the feed, or give both")
        self._tenancy.check()
        self._begun += 1
        return self._next + self._begun - 1
