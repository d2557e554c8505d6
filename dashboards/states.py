"""What a device does with its time, by one set of names, colours and queries for every panel.

Busy and idle seconds of a device add up to the time of its steps, so what is missing from a second was spent between
steps: in the optimizer, in loading data, or because nothing was asked of the pipeline. The six shares add up to one::

    │ busy │ waiting for data │ for a copy │ for the scheduler │ drain │ between steps │
    └──────────────────────────── in steps ───────────────────────────┘
    0                                                                                  1
"""

from __future__ import annotations

from typing import NamedTuple

from dashboards.queries import rate, total

__all__ = ["BETWEEN", "BUSY", "STATES", "WAITING", "State", "dominating", "dominating_code", "in_steps", "share"]


class State(NamedTuple):
    """A use of a device's time. Colours are those of Okabe and Ito, which colour-blind people tell apart."""

    label: str
    """In the label ``reason``; the first and the last are not served but made up in queries."""
    code: int
    """In the state timeline, which shows numbers."""
    name: str
    colour: str


BUSY = State("busy", 1, "Busy", "#009E73")
WAITING = (
    State("dependency", 2, "Waiting for data", "#E69F00"),
    State("copy", 3, "Waiting for a copy", "#0072B2"),
    State("dispatch", 4, "Waiting for the scheduler", "#D55E00"),
    State("drain", 5, "Drain", "#8C8C8C"),
)
BETWEEN = State("between", 6, "Between steps", "#CC79A7")
STATES = (BUSY, *WAITING, BETWEEN)


def share(state: State, by: str = "job, device") -> str:
    """The part of each second, from 0 to 1, that every device spends in ``state``."""
    busy, idle = total(by, rate("stage_busy_seconds_total")), total(by, rate("stage_idle_seconds_total"))
    if state is BUSY:
        return busy
    if state is BETWEEN:
        # A step counts when it ends, so a long one may bring more seconds than its interval had.
        return f"clamp_min(1 - {busy} - {idle}, 0)"
    return total(by, rate("stage_idle_seconds_total", f'reason="{state.label}"'))


def dominating(by: str) -> str:
    """The largest of the reasons to wait, by the labels in ``by``, as a part of all time in steps; keeps ``reason``."""
    waiting = total(f"{by}, reason", rate("stage_idle_seconds_total"))
    return f"topk by ({by}) (1, {waiting}\n  / on ({by}) group_left () {in_steps(by)})"


def in_steps(by: str) -> str:
    """Seconds of steps in each second, summed over the devices; no series where no step ended."""
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
