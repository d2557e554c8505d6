"""A stage whose forward changes its parameters is refused where it is recomputed: it would change them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.parameter import is_lazy

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.torch_internals import version_of

__all__ = ["ParameterWatch"]


class ParameterWatch:
    """Watches the parameters of one stage in its first checkpointed forward, by torch's version counters.

    An embedding's ``max_norm`` may change them: what is normed already, the recomputation leaves as it is.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._has_seen = False

    def during(self) -> AbstractContextManager[None]:
        """The context of a checkpointed forward. Raises ``RecomputeError`` if the first one changes a parameter."""
        return nullcontext() if self._has_seen else self._first()

    @contextmanager
    def _first(self) -> Iterator[None]:
        renormed = {id(part.weight) for part in self._module.modules() if getattr(part, "max_norm", None) is not None}
        before = [
            (name, parameter, version_of(parameter))
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in renormed and not is_lazy(parameter) and not parameter.is_inference()
        ]
        yield
        for name, parameter, version in before:
            if version_of(parameter) != version:
                raise RecomputeError(
                    f"stage {self._stage} changes its parameter {name.removeprefix('layers.')!r} in its forward, and a "
                    "recomputation would change it again; make it a buffer, or use checkpoint='never'"
                )
        self._has_seen = True
