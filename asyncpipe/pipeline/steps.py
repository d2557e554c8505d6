"""``steps``: many mini-batches one after the other, of which the next one begins before the last one has ended.

With the optimizers inside the step, a stage can begin the next step as soon as it is updated itself. So while the
devices end one step, the next one is fetched, cut and handed to them, and the results of the one before are read::

    caller    prepare 0 ─ prepare 1 ──── result 0 ─ prepare 2 ──── result 1 ─ …
    cpu:0               [ step 0 ······ ][ step 1 ······· ][ step 2 …
    cpu:1                  [ step 0 ······ ][ step 1 ······· ][ step 2 …

Steps that cannot overlap run one by one, each as ``Pipeline.step``, between the results.

A run of overlapping steps has one turn of the pipeline's gradients. Each update sets aside what it has left in the
gradients, so a failure restores those that the first unfinished update of their stage would have found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from asyncpipe.errors import ArgumentTypeError, BatchError, NestedWaitError, OptionError
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.model.feed import FromFeed
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.feeding import Feeding
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.remote_step import RemoteStep
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.step_inputs import NO_TARGET, StepOptions
from asyncpipe.runtime.started_step import Line, StartedStep

__all__ = ["FEED", "Batch", "StepRun", "check_batches", "run_steps", "run_steps_blocking"]


FEED: Any = FromFeed()
"""Stands for x where the pipeline's feed makes it."""


class Batch(NamedTuple):
    """One mini-batch for ``steps``, where ``(x, target)`` is ambiguous or says too little: ``Batch((ids, mask))``."""

    x: Any = FEED
    """Left out, the pipeline's feed makes x and target."""
    target: Any = NO_TARGET
    learning_rate: float | None = None
    """Set in all parameter groups of the pipeline's optimizers before they update."""


def check_batches(batches: object, ahead: object, *, blocking: bool) -> None:
    """Raise ``ArgumentTypeError`` or ``OptionError`` for arguments of ``steps`` that mean nothing."""
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise OptionError(f"ahead must be an integer of at least 0, got {ahead!r}")
    allowed = Iterable if blocking else (Iterable, AsyncIterable)
    if isinstance(batches, Tensor | Mapping | str | bytes | Arguments | Batch) or not isinstance(batches, allowed):
        kinds = "an iterable" if blocking else "an iterable or asynchronous iterable"
        raise ArgumentTypeError(
            f"steps takes {kinds} of mini-batches, got {type(batches).__name__}; give, for instance, a data loader or "
            "[(x, target)]"
        )


def _as_batch(value: Any) -> Batch:
    if isinstance(value, Batch):
        return value
    if not isinstance(value, tuple | list) or isinstance(value, Arguments):
        return Batch(value)
    if type(value) in (tuple, list) and len(value) == 2:
        return Batch(*value)
    raise BatchError(
        f"a mini-batch of steps is x, a pair (x, target) or Batch(x, target), got a {type(value).__name__} of "
        f"{len(value)}; name its parts, as in Batch(Arguments.of(a, b), target)"
    )


_Step = PreparedStep | RemoteStep


class StepRun:
    """The steps of one ``steps`` call that are under way."""

    def __init__(
        self, parts: PipelineParts, tenancy: Tenancy, feeding: Feeding, options: StepOptions, ahead: int
    ) -> None:
        self.ahead = ahead
        self.feeding = feeding
        self._parts = parts
        self.tenancy = tenancy
        self._options = options
        self._line: Line[Any] = Line()
        self.under_way: deque[tuple[_Step, StartedStep[Any]]] = deque()

    async def prepare(self, value: Any) -> _Step:
        """Check and cut a mini-batch."""
        x, target, learning_rate = _as_batch(value)
        return await self.feeding.prepare(x, target, replace(self._options, learning_rate=learning_rate))

    def prepare_blocking(self, value: Any) -> _Step:
        """As ``prepare``, on a thread that may block."""
        x, target, learning_rate = _as_batch(value)
        return self.feeding.prepare_blocking(x, target, replace(self._options, learning_rate=learning_rate))

    def check(self) -> None:
        """Raise ``OverlapError`` while other steps overlap; not to be called while one of this run is under way."""
        self._parts.check_between_steps()

    def overlaps(self, step: _Step) -> bool:
        """Whether ``step`` may be under way together with others."""
        return self.ahead > 0 and step.overlaps

    def joins(self, step: _Step) -> bool:
        """Whether ``step`` may begin now, behind those that are under way."""
        if not self.under_way:
            return True
        return self.overlaps(step) and self.under_way[0][0].training == step.training

    def start(self, step: _Step) -> None:
        """Begin ``step``, behind those that are under way."""
        if not self.under_way:
            self.check()
            self._parts.between_steps.owner = self
            if step.training:
                guard = self._parts.resources.guard
                try:
                    guard.enter(self, self)
                    guard.begin(self._parts.module.parameters(), repeats=True)
                except BaseException:
                    self._close()
                    raise
        try:
            self.under_way.append((step, step.start(self._line)))
        except BaseException:
            if not self.under_way:
                self._close()
            raise

    @property
    def is_full(self) -> bool:
        """Whether a result is due before the next step begins."""
        return len(self.under_way) > self.ahead

    async def take(self) -> StepResult:
        """The result of the oldest step, when it is issued."""
        step, started = self.under_way[0]
        execution = await started.issued()
        try:
            return self._finish(step, execution)
        except RuntimeError as error:
            if is_device_error(error):
                await self.tenancy.pool.run(execution.completed())  # As in ``StepProtocol``: it says which task.
            raise

    def take_blocking(self) -> StepResult:
        """As ``take``, on a thread that may block."""
        step, started = self.under_way[0]
        execution = started.wait()
        try:
            return self._finish(step, execution)
        except RuntimeError as error:
            if is_device_error(error):
                self.tenancy.pool.call(execution.completed())
            raise

    def _finish(self, step: _Step, execution: Any) -> StepResult:
        result = step.finish(execution)
        self.feeding.done(step)
        self.under_way.popleft()
        if not self.under_way:
            self._close()
        return result

    async def abort(self) -> None:
        """End all steps that are under way, and restore gradients."""
        for _, started in reversed(self.under_way):
            started.cancel()
        for _, started in self.under_way:
            await started.ended()
        self._drop()

    def abort_blocking(self) -> None:
        """As ``abort``, on a thread that may block."""
        try:
            for _, started in reversed(self.under_way):
                started.cancel()
            for _, started in self.under_way:
                started.wait_ended()
        finally:
            self._drop()

    def abort_later(self) -> None:
        """As ``abort``, on a thread that must not wait; what is left is dropped when the last step has ended."""
        left = [started for _, started in self.under_way]

        def ended(started: StartedStep[Any]) -> None:
            left.remove(started)
            if not left:
                self._drop()

        for _, started in reversed(tuple(self.under_way)):
            started.cancel()
            started.when_ended(partial(ended, started))

    def _drop(self) -> None:
        if self.under_way:
            while self.under_way:
                self.under_way.pop()[0].drop()
            self._close()

    def _close(self) -> None:
        """No step is under way: give the gradients back as the last update of each stage has left them."""
        guard = self._parts.resources.guard
        guard.end_repeats(self)
        self._parts.between_steps.owner = None


async def _each(batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch


async def run_steps(run: StepRun, batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[StepResult, None]:
    """The results of ``Pipeline.steps``."""
    failed: Exception | None = None
    source = _each(batches)
    try:
        while True:
            try:
                prepared = await run.prepare(await anext(source))
            except StopAsyncIteration:
                break
            except Exception as error:  # noqa: BLE001 - raised behind the results of the steps that have begun
                failed = error
                break
            while not run.joins(prepared):
                yield await run.take()
            run.tenancy.check_caller(blocking=False)
            if run.overlaps(prepared):
                async with run.tenancy.turn:
                    run.tenancy.check()
                    run.start(prepared)
                if run.is_full:
                    yield await run.take()
                continue
            async with run.tenancy.turn:
                run.tenancy.check()
                run.check()
                result = await prepared.run()
                run.feeding.done(prepared)
            yield result
            del result
        while run.under_way:
            yield await run.take()
    except GeneratorExit:
        try:
            while run.under_way:
                await run.take()
        except BaseException:
            await run.abort()
            raise
        raise
    except BaseException:
        await run.abort()
        raise
    finally:
        run.feeding.back()
    if failed is not None:
        raise failed


def run_steps_blocking(run: StepRun, batches: Iterable[Any]) -> Generator[StepResult, None, None]:
    """The results of ``SyncPipeline.steps``."""
    failed: Exception | None = None
    source = iter(batches)
    try:
        while True:
            try:
                prepared = run.prepare_blocking(next(source))
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - as above
                failed = error
                break
            while not run.joins(prepared):
                yield run.take_blocking()
            run.tenancy.check_caller(blocking=True)
            if run.overlaps(prepared):
                with run.tenancy.blocking_turn:
                    run.tenancy.check()
                    run.start(prepared)
                if run.is_full:
                    yield run.take_blocking()
                continue
            with run.tenancy.blocking_turn:
                run.tenancy.check()
                run.check()
                result = prepared.run_blocking()
                run.feeding.done(prepared)
            yield result
            del result
        while run.under_way:
            yield run.take_blocking()
    except GeneratorExit:
        try:
            run.tenancy.check_caller(blocking=True)  # The garbage collector may close it on any thread.
        except NestedWaitError:
            run.abort_later()
            raise
        try:
            while run.under_way:
                run.take_blocking()
        except BaseException:
            run.abort_blocking()
            raise
        raise
    except BaseException:
        run.abort_blocking()
        raise
    finally:
        run.feeding.back()
    if failed is not None:
        raise failed
