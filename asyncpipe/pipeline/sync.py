"""A pipeline for callers without ``await``: scripts, notebooks, frameworks that are not asynchronous."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future
from operator import methodcaller
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from asyncpipe.errors import ArgumentTypeError
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.feeding import Feeding
from asyncpipe.pipeline.model_proxy import ModelProxy
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.saving import NO_STATE, Resumable, SaveFormat, Saves
from asyncpipe.pipeline.stages_here import StagesHere
from asyncpipe.pipeline.step_inputs import NO_TARGET, StepOptions
from asyncpipe.pipeline.steps import FEED, StepRun, check_batches, one_step, run_steps_blocking
from asyncpipe.runtime.portal import block_until_done
from asyncpipe.runtime.waits import drive_blocking

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["SyncPipeline"]


class SyncPipeline(ModelProxy):
    """A pipeline without ``await``: ``with pipeline.sync() as pipe: pipe.step(x, target)``.

    It also works inside a running loop (a notebook), since the pool drives steps on a loop of its own. Ctrl-C during a
    step cancels it between two tasks, and is raised when the running tasks have ended. Everything else, such as
    ``change_schedule()``, is the pipeline's.
    """

    def __init__(
        self,
        pipeline: ModelProxy,
        parts: PipelineParts,
        tenancy: Tenancy,
        feeding: Feeding,
        stages: StagesHere,
        saves: Saves,
    ) -> None:
        """Made by ``Pipeline.sync``."""
        super().__init__(parts, tenancy, feeding, stages, saves)
        self._pipeline = pipeline

    def __repr__(self) -> str:
        return repr(self._pipeline)

    async def __aenter__(self) -> NoReturn:
        """Raises ``ArgumentTypeError``."""
        raise ArgumentTypeError("sync() is for code without await: use 'with', or 'async with' the pipeline itself")

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to leave."""

    def __enter__(self) -> SyncPipeline:
        drive_blocking(self._tenancy.opened())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(
        self,
        x: Any = FEED,
        target: Any = NO_TARGET,
        *,
        return_outputs: bool = True,
        update: bool = True,
        scaler: GradScaler | None = None,
        learning_rate: float | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> StepResult:
        """One mini-batch through the pipeline, as ``Pipeline.step``; blocks until the last task is issued."""
        step = StepOptions(return_outputs, update, scaler, learning_rate, num_items_in_batch)
        return drive_blocking(one_step(self._tenancy, self._feeding, x, target, step, blocking=True))

    def steps(
        self,
        batches: Iterable[Any],
        *,
        ahead: int = 1,
        return_outputs: bool = True,
        update: bool = True,
        scaler: GradScaler | None = None,
    ) -> Generator[StepResult, None, None]:
        """The results of many mini-batches, as ``Pipeline.steps``: ``for result in pipe.steps(loader)``."""
        check_batches(batches, ahead, blocking=True)
        step = StepOptions(return_outputs, update, scaler)
        return run_steps_blocking(StepRun(self._parts, self._tenancy, self._feeding, step, ahead), batches)

    def save(
        self,
        folder: str | PathLike[str],
        *,
        state: Mapping[str, Resumable] = NO_STATE,
        extra: object = None,
        format: SaveFormat = "safetensors",  # noqa: A002
        background: bool = False,
    ) -> Future[None]:
        """Write everything that training goes on from, as ``Pipeline.save``; ``result()`` waits for the end."""
        saving = drive_blocking(self._saves.save(folder, state, extra, format, blocking=True))
        if not background:
            block_until_done(saving)
            saving.result()
        return saving

    def load(self, folder: str | PathLike[str], *, state: Mapping[str, Resumable] = NO_STATE) -> Any:
        """Go on from a folder, as ``Pipeline.load``."""
        return drive_blocking(self._saves.load(folder, state, blocking=True))

    def generate(self, inputs: Any, **options: Any) -> Tensor:
        """Tokens that the model generates, as ``Pipeline.generate``; blocks."""
        return self._generation(inputs, options).tokens()

    def close(self) -> None:
        """Wait for steps under way, then end every thread, as ``Pipeline.aclose``. May be called again."""
        drive_blocking(self._saves.ended())
        drive_blocking(self._tenancy.closed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("sync"), (self._pipeline,)
