"""What is told of compiled stages: each compilation as it happens, and what a stage is made of in the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Compilation", "CompiledStage", "compiled_stages"]


class Compilation(NamedTuple):
    """One call of a stage in which something was compiled, or captured."""

    stage: int
    backend: str
    kind: str
    """What the call was: ``forward`` (without a graph, as the first run of a recomputed micro-batch), ``training``, or
    ``eager``: nothing was compiled, since the limit of recompilations was reached or every frame was skipped."""
    forward_graphs: int
    backward_graphs: int
    graph_breaks: tuple[str, ...]
    """Why the stage is more than one graph; empty where it is one."""
    again: str
    """Why calls of this kind were compiled once more; empty the first time."""
    seconds: float


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """What is compiled of one stage, as far as its calls have shown."""

    stage: int
    backend: str
    forward_graphs: int
    """Graphs of one call: 1 where the stage is whole, 0 where it runs without the compiler."""
    backward_graphs: int
    """The same of its backward; 0 before it has trained."""
    graph_breaks: tuple[str, ...]
    """Their reasons, each once."""
    recompilations: tuple[str, ...]
    """Why calls were compiled that are of a kind compiled before; one entry each."""
    seconds: float
    """Of all compilations."""

    def __str__(self) -> str:
        if not self.forward_graphs:
            return f"stage {self.stage} is not compiled"
        graphs = f"{self.forward_graphs} + {self.backward_graphs} graphs (forward + backward)"
        return (
            f"stage {self.stage}: {graphs} by {self.backend}, {len(self.graph_breaks)} graph breaks, "
            f"{len(self.recompilations)} recompilations, {self.seconds:.1f} s"
        )


def compiled_stages(compilations: Iterable[Compilation]) -> tuple[CompiledStage, ...]:
    """What ``compilations`` have made of each stage, in the order of the stages."""
    by_stage: dict[int, list[Compilation]] = {}
    for each in compilations:
        by_stage.setdefault(each.stage, []).append(each)
    return tuple(
        CompiledStage(
            stage,
            mine[0].backend,
            0 if any(each.kind == "eager" for each in mine) else max(each.forward_graphs for each in mine),
            max(each.backward_graphs for each in mine),
            tuple(dict.fromkeys(reason for each in mine for reason in each.graph_breaks)),
            tuple(each.again for each in mine if each.again),
            sum(each.seconds for each in mine),
        )
        for stage, mine in sorted(by_stage.items())
    )
