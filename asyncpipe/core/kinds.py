"""The kinds of tasks: the one table of their letters, names and colours.

A new kind takes a row here, the nodes that ``graph/graph_builder.py`` adds, the computation that
``ops/execute/binder.py`` binds and, unless it costs nothing in simulations, its cost in ``predict/costs.py``. Pictures,
metrics, traces and dashboards read this table. "Where does a change belong?" in ARCHITECTURE.md lists what else may
tell kinds apart.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

__all__ = [
    "COLLECTIVE_KINDS",
    "COMPUTE_KINDS",
    "COPY_KINDS",
    "INPUT_GRADIENT_KINDS",
    "RELEASING_KINDS",
    "SCHEDULED_KINDS",
    "TaskKind",
]


class TaskKind(StrEnum):
    """What a task does; the value is the letter used in schedules, journals and pictures.

    F and B are as far apart as blue and green can be. I is a teal and W a lilac, so that the halves of a backward
    differ from each other and from a whole one beside them. Pictures also write the letter on the task, for readers
    who cannot tell the colours apart.
    """

    word: str
    """The name in legends."""
    colour: str
    """The background of the task in pictures, ``#rrggbb``; dark text is readable on each."""
    trace_colour: str
    """The name in Chrome's fixed list of colours, the only ones that a Chrome trace can ask for."""

    FORWARD = "F", "forward", "#7fb3e0", "thread_state_runnable"
    RECOMPUTE = "R", "recompute", "#f7dc6f", "yellow"
    BACKWARD = "B", "backward", "#82c77f", "good"
    INPUT_GRADIENT = "I", "input gradient", "#4fc3b8", "thread_state_running"
    WEIGHT_GRADIENT = "W", "weight gradient", "#c7a6e2", "olive"
    COPY = "C", "copy", "#9aa5b1", "grey"
    UPDATE = "U", "update", "#f0a58f", "generic_work"
    SUM = "S", "sum", "#f2b5d0", "rail_animation"
    """Adds the gradients of a tied parameter's replicas to its own."""
    OFFLOAD = "O", "offload", "#d9b38c", "light_memory_dump"
    """Copies what a forward keeps for its backward to the host's memory, and frees it on the device."""
    LOAD = "L", "load", "#b5d96b", "rail_load"
    """Brings back what O has offloaded."""
    REDUCE = "A", "reduce", "#e6c229", "rail_response"
    """Adds up one bucket of a stage's gradients over the replicas of the pipeline; each replica adds a part of it."""
    GATHER = "G", "gather", "#d0d6a3", "rail_idle"
    """Collects the parts of one bucket from all replicas: gradients, or the parameters that these have updated."""
    NORM = "N", "norm", "#b8e8f0", "startup"
    """Completes a stage's gradients and takes their norm; at one stage, that of the gradients of all stages."""

    # The defaults are for type checkers, to which ``TaskKind("F")`` is a call of this, and not the look-up that it is.
    def __new__(cls, letter: str, word: str = "", colour: str = "", trace_colour: str = "") -> Self:
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.word, kind.colour, kind.trace_colour = word, colour, trace_colour
        return kind


SCHEDULED_KINDS = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT)
"""The kinds of actions in schedules; tasks of the other kinds are added when a schedule is lowered."""
COMPUTE_KINDS = (TaskKind.FORWARD, TaskKind.RECOMPUTE, *SCHEDULED_KINDS[1:])
"""The kinds that run a stage on a micro-batch."""
INPUT_GRADIENT_KINDS = (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
"""The kinds that compute the gradient of a stage's input, which the stage before it waits for."""
COPY_KINDS = (TaskKind.COPY, TaskKind.OFFLOAD, TaskKind.LOAD)
"""The kinds that move tensors, beside what their device computes."""
RELEASING_KINDS = (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)
"""The kinds that are the last to use what a forward kept."""
COLLECTIVE_KINDS = (TaskKind.REDUCE, TaskKind.GATHER)
"""The kinds that every replica of a stage runs at about the same time, on what all of them have made."""
