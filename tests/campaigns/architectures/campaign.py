"""The campaign: each architecture in a process of its own with a time limit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.campaigns.architectures import zoo_diffusers, zoo_transformers, zoo_vision
from tests.campaigns.architectures.architecture import ZOO
from tests.campaigns.architectures.judge import CELLS, judge
from tests.campaigns.harness import Campaign, Run, Verdict

__all__ = ["CAMPAIGN"]

assert zoo_diffusers, zoo_transformers
assert zoo_vision


def _chunks(run: Run) -> Iterator[list[tuple[str, str, str]]]:
    """The cells of one architecture after the other."""
    only, cell = run.options.only, run.options.cell
    for name in run.while_time(only.split(",") if only else ZOO):
        importlib.import_module(ZOO[name].library)  # once, before processes are forked
        yield [(name, *each) for each in ([cell.split(",")] if cell else CELLS)]


def _judged(chunk: Sequence[tuple[str, str, str]]) -> Iterator[str | Verdict]:
    return judge(ZOO[chunk[0][0]], [each[1:] for each in chunk])


def _repeat(case: Any) -> str:
    name, *cell = case
    return f"--only {name} --cell {','.join(cell)}"


CAMPAIGN = Campaign(
    "architectures",
    lambda run: run.judge(_chunks(run), _judged, run.options.seconds),
    {
        "only": "",
        "cell": ("", "this cell alone, as in zb-h1,never"),
        "seconds": (300.0, "for each architecture at most"),
        "processes": 1,
        "here": False,
    },
    repeat=_repeat,
)
