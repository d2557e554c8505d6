"""``steps``: many mini-batches one after the other, of which the next one begins before the last one has ended.

With the optimizers inside the step, a stage can begin the next step as soon as it is updated itself. So while the
devices end one step, the next one is fetched, cut and handed to them, and the results of the one before are read::

    caller    prepare 0 ─ prepare 1 ──── result 0 ─ prepare 2 ──── result 1 ─ …
    cpu:0               [ step 0 ······ ][ step 1 ······· ][ step 2 …
    cpu:1                  [ step 0 ······ ][ step 1 ······· ][ step 2 …

Steps that cannot overlap run one by one, each as ``Pipeline.step``, between the results.

``results`` decides what comes next, and only yields it: something to wait for, or a result to hand out.
``run_steps`` and ``run_steps_blocking`` carry it out, for a coroutine and for a thread.

A run of overlapping steps has one turn of the pipeline's gradients. Each update sets aside what it has left in the
gradients, so a failure restores those that the first unfinished update of their stage would have found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from asyncpipe.errors import ArgumentTypeError, BatchError, NestedWaitError, OptionError
from asyncpipe.ops.model.feed import FromFeed
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.feeding import Feeding, Step
from asyncpipe.pipeline.overlap import why_alone
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step_inputs import NO_TARGET, StepOptions
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.portal import Ended, PortalCall
from asyncpipe.runtime.waits import Waiting, Waits, drive, drive_blocking, has_ended

__all__ = ["FEED", "Batch", "StepRun", "check_batches", "one_step", "run_steps", "run_steps_blocking"]


FEED: Any = FromFeed()
"""Stands for x where the pipeline's feed makes it."""


class Batch(NamedTuple):
    """One mini-batch for ``steps``, where ``(x, target)`` is ambiguous or says too little: ``Batch((ids, mask))``."""

    x: Any = FEED
    """Left out, the pipeline's feed makes x and target."""
    target: Any = NO_TARGET
    learning_rate: float | None = None
    """Set in all parameter groups of the pipeline's optimizers before they update."""
    num_items_in_batch: float | Tensor | None = None
    """As in ``Pipeline.step``."""


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


def one_step(
    tenancy: Tenancy, feeding: Feeding, x: Any, target: Any, options: StepOptions, *, blocking: bool
) -> Waiting[StepResult]:
    """One mini-batch through the pipeline, as ``Pipeline.step``, for both kinds of callers."""
    tenancy.check_caller(blocking=blocking)
    yield from tenancy.turn.acquired(nested=blocking)
    try:
        tenancy.check()
        feeding.parts.check_between_steps()
        try:
            prepared = yield from feeding.prepare(x, target, options)
            result = yield from prepared.run()
        except BaseException:
            feeding.give_up_prepared()
            raise
        feeding.step_done(prepared)
        return result
    finally:
        tenancy.turn.release()


@dataclass(eq=False, slots=True)
class StepRun:
    """The steps of one ``steps`` call that are under way."""

    parts: PipelineParts
    tenancy: Tenancy
    feeding: Feeding
    options: StepOptions
    ahead: int
    line: Line[Any] = field(default_factory=Line)
    under_way: deque[tuple[Step, PortalCall[Any]]] = field(default_factory=deque)

    def prepare(self, value: Any) -> Waiting[Step]:
        """Check and cut a mini-batch."""
        x, target, learning_rate, items = _as_batch(value)
        step = replace(self.options, learning_rate=learning_rate, num_items_in_batch=items)
        return self.feeding.prepare(x, target, step)

    def alone(self, step: Step) -> Waiting[StepResult]:
        """Run ``step`` from its begin to its end, while no other is under way."""
        self.check()
        result = yield from step.run()
        self.feeding.step_done(step)
        return result

    def check(self) -> None:
        """Raise ``OverlapError`` while other steps overlap; not to be called while one of this run is under way."""
        self.parts.check_between_steps()

    def overlaps(self, step: Step) -> bool:
        """Whether ``step`` may be under way together with others: all that it leaves behind is made by its tasks."""
        inputs = step.inputs
        if self.ahead == 0 or (inputs.training and inputs.options.scaler is not None):
            return False
        return why_alone(self.parts, self.tenancy, step.graph, training=inputs.training) is None

    def joins(self, step: Step) -> bool:
        """Whether ``step`` may begin now, behind those that are under way."""
        if not self.under_way:
            return True
        return self.overlaps(step) and self.under_way[0][0].inputs.training == step.inputs.training

    def start(self, step: Step) -> None:
        """Begin ``step``, behind those that are under way."""
        if not self.under_way:
            self.check()
            self.parts.between_steps.owner = self
            self.parts.resources.begin_replicas()
            if step.inputs.training:
                guard = self.parts.resources.guard
                try:
                    guard.enter(self, self)
                    guard.begin(self.parts.module.parameters(), repeats=True)
                except BaseException:
                    self._close()
                    raise
        try:
            self.under_way.append((step, step.start(self.line)))
        except BaseException:
            if not self.under_way:
                self._close()
            raise

    @property
    def is_full(self) -> bool:
        """Whether a result is due before the next step begins."""
        return len(self.under_way) > self.ahead

    def oldest(self) -> Waiting[StepResult]:
        """The result of the oldest step, when it is issued."""
        step, call = self.under_way[0]
        result: StepResult = yield from step.finish((yield call))
        self.feeding.step_done(step)
        self.under_way.popleft()
        if not self.under_way:
            self._close()
        return result

    def abort(self) -> Waiting[None]:
        """End all steps that are under way, and restore gradients."""
        try:
            self._cancel()
            for _, call in self.under_way:
                yield Ended(call)
        finally:
            self._drop()

    def abort_later(self) -> None:
        """As ``abort``, on a thread that must not wait; what is left is dropped when the last step has ended."""
        left = [call for _, call in self.under_way]

        def ended(call: PortalCall[Any], _: object) -> None:
            left.remove(call)
            if not left:
                self._drop()

        self._cancel()
        for call in tuple(left):
            call.future.add_done_callback(partial(ended, call))

    def _cancel(self) -> None:
        # From the last to the first: no step may begin behind one that never will.
        for _, call in reversed(self.under_way):
            if call.is_pending:
                call.cancel()

    def _drop(self) -> None:
        if self.under_way:
            while self.under_way:
                self.under_way.pop()[0].abandon()
            self._close()

    def _close(self) -> None:
        """No step is under way: give the gradients back as the last update of each stage has left them."""
        resources = self.parts.resources
        resources.guard.end_repeats(self, resources.undo)
        self.parts.between_steps.owner = None


_END = object()


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Waits for the next mini-batch; ``_END`` behind the last one."""

    source: Any
    """An iterator, asynchronous for callers that await."""

    async def awaited(self) -> Any:
        return await anext(self.source, _END)

    def wait(self) -> Any:
        return next(self.source, _END)


@dataclass(slots=True)
class _Due:
    """A result to hand out."""

    result: StepResult | None

    def handed_out(self) -> StepResult:
        """The result, which nothing here keeps."""
        result, self.result = self.result, None
        assert result is not None
        return result


_Next = Generator[_Due | Waits[Any], Any, None]


def results(run: StepRun, source: Any, *, blocking: bool) -> _Next:
    """What comes next in a ``steps`` call for the mini-batches of ``source``."""
    failed: Exception | None = None
    fetch = _Fetch(source)
    try:
        while True:
            try:
                value = yield fetch
                if value is _END:
                    break
                prepared = yield from run.prepare(value)
                del value
            except Exception as error:  # noqa: BLE001 - raised behind the results of the steps that have begun
                failed = error
                break
            while not run.joins(prepared):
                yield _Due((yield from run.oldest()))
            run.tenancy.check_caller(blocking=blocking)
            due = None
            yield from run.tenancy.turn.acquired(nested=blocking)
            try:
                run.tenancy.check()
                if run.overlaps(prepared):
                    run.start(prepared)
                else:
                    due = _Due((yield from run.alone(prepared)))
            finally:
                run.tenancy.turn.release()
            if due is not None:
                yield due
            elif run.is_full:
                yield _Due((yield from run.oldest()))
        while run.under_way:
            yield _Due((yield from run.oldest()))
    except GeneratorExit:
        # Who drives this completes the steps (``_left``): the collector may close this one before that one.
        raise
    except BaseException:
        yield from run.abort()
        raise
    finally:
        run.feeding.give_up_prepared()
    if failed is not None:
        raise failed


def _left(run: StepRun, *, blocking: bool) -> Waiting[None]:
    """Complete the steps that have begun; the caller has left the loop."""
    try:
        if blocking:
            try:
                run.tenancy.check_caller(blocking=True)  # The garbage collector may close it on any thread.
            except NestedWaitError:
                run.abort_later()
                raise
        try:
            while run.under_way:
                yield from run.oldest()
        except BaseException:
            yield from run.abort()
            raise
    finally:
        run.feeding.give_up_prepared()


async def _each(batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch


async def run_steps(run: StepRun, batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[StepResult, None]:
    """The results of ``Pipeline.steps``."""
    steps = results(run, _each(batches), blocking=False)
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            following = steps.send(value) if error is None else steps.throw(error)
            value = error = None
            if isinstance(following, _Due):
                yield following.handed_out()
            else:
                value = await following.awaited()
        except StopIteration:
            return
        except GeneratorExit:
            steps.close()
            await drive(_left(run, blocking=False))
            raise
        except BaseException as caught:
            if has_ended(steps):
                raise
            error = caught


def run_steps_blocking(run: StepRun, batches: Iterable[Any]) -> Generator[StepResult, None, None]:
    """The results of ``SyncPipeline.steps``."""
    steps = results(run, iter(batches), blocking=True)
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            following = steps.send(value) if error is None else steps.throw(error)
            value = error = None
            if isinstance(following, _Due):
                yield following.handed_out()
            else:
                value = following.wait()
        except StopIteration:
            return
        except GeneratorExit:
            steps.close()
            drive_blocking(_left(run, blocking=True))
            raise
        except BaseException as caught:
            if has_ended(steps):
                raise
            error = caught
