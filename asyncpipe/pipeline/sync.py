"""A pipeline for callers without ``await``: scripts, notebooks, frameworks that are not asynchronous."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step import NO_TARGET, StepOptions

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from asyncpipe.pipeline.pipeline import Pipeline

__all__ = ["SyncPipeline"]


class SyncPipeline:
    """A pipeline without ``await``: ``with pipeline.sync() as pipe: pipe.step(x, target)``.

    Steps are driven on a loop in a thread of their own, so this also works inside a running loop (a notebook).
    Ctrl-C during a step cancels it between two tasks and is raised once the running ones have ended. Everything
    else, such as ``parameters()`` or ``eval()``, is the pipeline's.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __enter__(self) -> SyncPipeline:
        self._pipeline._tenancy.open_in_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(
        self,
        x: Any,
        target: Any = NO_TARGET,
        *,
        return_outputs: bool = True,
        update: bool = True,
        scaler: GradScaler | None = None,
    ) -> StepResult:
        """One mini-batch through the pipeline, as ``Pipeline.step``; blocks until the last task is issued."""
        return self._pipeline._step_blocking(x, target, StepOptions(return_outputs, update, scaler))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as ``Pipeline.__call__``."""
        return self._pipeline(*args, **kwargs)

    def train(self, mode: bool = True) -> SyncPipeline:
        """Set training mode, as ``nn.Module.train``."""
        self._pipeline.train(mode)
        return self

    def eval(self) -> SyncPipeline:
        """Set evaluation mode: steps run forwards only."""
        return self.train(False)

    def close(self) -> None:
        """Wait for steps under way, then end every thread, as ``Pipeline.aclose``. May be called again."""
        self._pipeline._tenancy.close()

    def __len__(self) -> int:
        return len(self._pipeline)

    def __getitem__(self, index: int) -> nn.Module:
        return self._pipeline[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._pipeline)

    def __getattr__(self, name: str) -> Any:
        if name == "_pipeline":  # Not there yet: a copy is being made.
            raise AttributeError(name)
        return getattr(self._pipeline, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"pipeline": self._pipeline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pipeline = state["pipeline"]
