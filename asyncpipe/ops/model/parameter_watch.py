"""What a stage does to its parameters that cannot be right, seen in its first forward: changing or caching them.

A forward that changes its parameters is refused where it is recomputed: it would change them again. A forward inside
``torch.nn.utils.parametrize.cached()`` is refused because that cache is one for all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from asyncpipe.errors import RecomputeError, StageError
from asyncpipe.ops.torch_internals import caches_parametrizations, version_of

__all__ = ["ParameterWatch"]

_NOTHING = nullcontext()


class ParameterWatch:
    """Watches the parameters of one stage in its first forwards, by torch's version counters.

    An embedding's ``max_norm`` may change them: what is normed already, the recomputation leaves as it is.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._has_seen = False
        self._parametrized = [part for part in module.modules() if isinstance(part, parametrize.ParametrizationList)]
        """Whose cache is still to be looked for."""

    def uncached(self) -> AbstractContextManager[None]:
        """The context of a forward. Raises ``StageError`` if the first one caches what parametrizations compute."""
        return self._refusing_caches() if self._parametrized else _NOTHING

    @contextmanager
    def _refusing_caches(self) -> Iterator[None]:
        def refuse(*_: object) -> None:
            if caches_parametrizations():
                raise StageError(
                    f"stage {self._stage} uses torch.nn.utils.parametrize.cached(), whose cache is one for all "
                    "threads: stages would get weights of each other's graphs; leave cached() out of the forward"
                )

        hooks = [part.register_forward_pre_hook(refuse) for part in self._parametrized]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._parametrized = []

    def during(self) -> AbstractContextManager[None]:
        """The context of a checkpointed forward. Raises ``RecomputeError`` if the first one changes a parameter."""
        return _NOTHING if self._has_seen else self._first()

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
