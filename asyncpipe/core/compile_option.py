"""The option ``compile`` of a pipeline: whether and how its stages are compiled. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from asyncpipe.errors import OptionError

__all__ = ["CUDA_GRAPHS", "CompileOption"]

CUDA_GRAPHS = "cudagraphs"

_NO_TREES = (
    "keeps one set of buffers for CUDA graphs, which the next micro-batch would overwrite while this one waits for "
    f"its backward; use compile={CUDA_GRAPHS!r}, or mode 'max-autotune-no-cudagraphs'"
)


@dataclass(frozen=True, slots=True)
class CompileOption:
    """What each stage is compiled with; the fields but the last two are arguments of ``torch.compile``."""

    fullgraph: bool = True
    """Whether a stage that is not one graph is an error. If not, graph breaks are warnings."""
    dynamic: bool | None = None
    """``None``: sizes are fixed until they are seen to differ; ``True``: never; ``False``: each size is compiled."""
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    regional: bool = True
    """Whether only the blocks of a stage that has such are compiled, once for all of them; if not, whole stages."""
    cuda_graphs: bool = False
    """Whether nothing is compiled, and kernels are captured in CUDA graphs instead."""

    def __post_init__(self) -> None:
        for name in ("fullgraph", "regional"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"compile: {name} must be True or False, got {value!r}")
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise OptionError(f"compile: dynamic must be True, False or None, got {self.dynamic!r}")
        if not (callable(self.backend) or (isinstance(self.backend, str) and self.backend)):
            raise OptionError(f"compile: backend must be the name of a backend or a function, got {self.backend!r}")
        if self.backend == CUDA_GRAPHS:
            raise OptionError(f"compile: the backend {CUDA_GRAPHS!r} {_NO_TREES}")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise OptionError(f"compile: options must be a dict for the backend, got {self.options!r}")
        if self.mode is not None:
            self._check_mode()
        if (self.options or {}).get("triton.cudagraphs"):
            raise OptionError(f"compile: the option 'triton.cudagraphs' {_NO_TREES}")

    def _check_mode(self) -> None:
        if self.options is not None:
            raise OptionError("compile: give mode or options, not both; torch.compile takes one of them")
        if self.backend != "inductor":
            raise OptionError("compile: a mode is one of the backend 'inductor'; leave mode or backend out")
        if self.mode in ("reduce-overhead", "max-autotune"):
            raise OptionError(f"compile: the mode {self.mode!r} {_NO_TREES}")
        if self.mode not in ("default", "max-autotune-no-cudagraphs"):
            raise OptionError(f"compile: mode must be 'default' or 'max-autotune-no-cudagraphs', got {self.mode!r}")

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """The option that ``value`` means: a bool, arguments for ``torch.compile``, or ``"cudagraphs"``.

        ``None`` where nothing is compiled. Raises ``OptionError``.
        """
        if value is False or value is None:
            return None
        if value is True:
            return cls()
        if value == CUDA_GRAPHS:
            return cls(cuda_graphs=True)
        known = [each.name for each in fields(cls) if each.name != "cuda_graphs"]
        if not isinstance(value, Mapping):
            raise OptionError(
                f"compile must be True, False, {CUDA_GRAPHS!r}, or a dict of arguments for torch.compile "
                f"({', '.join(known)}), got {value!r}"
            )
        if unknown := [key for key in value if key not in known]:
            instead = "; compile=False compiles nothing" if "disable" in unknown else ""
            raise OptionError(
                f"compile: {', '.join(map(repr, unknown))} cannot be given for stages, only {', '.join(known)}{instead}"
            )
        return cls(**value)

    @property
    def name(self) -> str:
        """What reports call it."""
        if self.cuda_graphs:
            return CUDA_GRAPHS
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "backend")
