"""How a device spends its time: the names, colours and queries that all panels use.

The busy and idle seconds of a device add up to the time of its steps. The rest of each second is time between steps:
the optimizer, loading of data, or a pipeline that nobody calls. The eight shares add up to one::

    │ busy │ waiting for data │ for an edge │ for a copy │ for another job │ for the scheduler │ drain │ between steps │
    └──────────────────────────────────────────── in steps ───────────────────────────────────────────┘
    0                                                                                                                  1
"""

from __future__ import annotations

from typing import NamedTuple

from dashboards.queries import rate, total

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "SKY",
    "VERMILION",
    "YELLOW",
    "BETWEEN",
    "BUSY",
    "STATES",
    "WAITING",
    "State",
    "dominating_code",
    "in_steps",
    "share",
    "waiting",
]

GREEN = "#009E73"
ORANGE = "#E69F00"
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREY = "#8C8C8C"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
"""The colours of Okabe and Ito, which colour-blind readers can distinguish, and a grey."""


class State(NamedTuple):
    """A use of a device's time."""

    label: str
    """The value of the label ``reason``; the first and the last state get theirs in the query."""
    code: int
    """The number in the state timeline."""
    name: str
    colour: str


BUSY = State("busy", 1, "Busy", GREEN)
WAITING = (
    State("dependency", 2, "Waiting for data", ORANGE),
    State("edge", 3, "Waiting for an edge", SKY),
    State("copy", 4, "Waiting for a copy", BLUE),
    State("shared", 5, "Waiting for another job", YELLOW),
    State("dispatch", 6, "Waiting for the scheduler", VERMILION),
    State("drain", 7, "Drain", GREY),
)
BETWEEN = State("between", 8, "Between steps", PURPLE)
STATES = (BUSY, *WAITING, BETWEEN)


def share(state: State) -> str:
    """The share of each second, from 0 to 1, that every device spends in ``state``."""
    by = "job, device"
    busy, idle = total(by, rate("stage_busy_seconds_total")), total(by, rate("stage_idle_seconds_total"))
    if state is BUSY:
        return busy
    if state is BETWEEN:
        # A step counts when it ends, so a long one may add more seconds than the interval has.
        return f"clamp_min(1 - {busy} - {idle}, 0)"
    return total(by, rate("stage_idle_seconds_total", f'reason="{state.label}"'))


def waiting() -> str:
    """The share of all time in steps of each reason of idle time, by job."""
    idle = total("job, reason", rate("stage_idle_seconds_total"))
    return f"{idle}\n  / on (job) group_left () {in_steps('job')}"


def in_steps(by: str) -> str:
    """Seconds of steps per second, summed over the devices; no series if no step ended."""
    busy, idle = total(by, rate("stage_busy_seconds_total")), total(by, rate("stage_idle_seconds_total"))
    return f"({busy}\n    + {idle} > 0)"


def dominating_code() -> str:
    """The code of the state in which each device spends most of its time.

    ``topk`` leaves one share for each device, with its reason; 0 times that, plus the reason's code, is the code.
    """
    shares = "\n      or ".join(
        (
            _labelled(share(BUSY), BUSY),
            total("job, device, reason", rate("stage_idle_seconds_total")),
            _labelled(share(BETWEEN), BETWEEN),
        )
    )
    codes = "\n      or ".join(_labelled(f"vector({state.code})", state) for state in STATES)
    return (
        f"max by (job, device) (\n  0 * topk by (job, device) (1,\n      {shares}\n  )\n"
        f"  + on (reason) group_left () (\n      {codes}\n  )\n)"
    )


def _labelled(expression: str, state: State) -> str:
    return f'label_replace({expression}, "reason", "{state.label}", "", "")'
