"""The Markdown page: the machine, a table of verdicts, and of each check its figures beside what was expected."""

from __future__ import annotations

from functools import partial

from asyncpipe.bench import Figures
from asyncpipe.bench.harness import table

__all__ = ["show"]

ITEMS = {
    2: "processor time of a task",
    3: "messages between worker processes",
    4: "steps overlap",
    5: "inputs and targets",
    6: "completion and contexts",
    7: "NCCL edges",
    8: "CUDA graphs",
    9: "gradients and updates",
    10: "memory",
    11: "clock",
    12: "threads or processes",
    13: "compiling",
    14: "tiny tasks",
    15: "steps in a row",
}
"""What was made fast on GPUs: the numbers that checks give as theirs."""


def show(figures: Figures) -> str:
    """The page of what ``run`` has found."""
    where = figures["environment"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in figures["verdicts"].items() if count)
    device = where.get("GPU 0", "CPU devices").partition(",")[0]
    section = partial(_section, on_gpu=figures["gpus"] > 0)
    head = [
        f"# {figures['date'][:10]}: `python -m benchmarks gpu` on {device}",
        f"{figures['date']}, `{figures['command']}`, {figures['seconds']:.0f} s: {counts}.",
        "\n".join(table([("", "machine"), *where.items()])),
        _verdicts_explained(on_gpu=figures["gpus"] > 0),
        "\n".join(_summary(figures)),
    ]
    return "\n\n".join([*head, "## What was measured", *map(section, figures["checks"])])


def _verdicts_explained(*, on_gpu: bool) -> str:
    judged = (
        "MISSED: what must be so is so, but a figure is not as expected of a GPU."
        if on_gpu
        else "On CPU devices what is expected of a GPU is shown and not judged (RAN): what fails here is wrong on "
        "every machine, what passes says nothing about a GPU."
    )
    return f"PASS and FAIL: what must be so on every device. {judged}"


def _summary(figures: Figures) -> list[str]:
    rows = [("check", "verdict", "seconds", "point", "question")]
    for each in figures["checks"]:
        points = ", ".join(f"{item} {ITEMS[item]}" for item in each["items"])
        rows.append((f"`{each['name']}`", each["verdict"], f"{each['seconds']:.1f}", points, each["question"]))
    return table(rows)


def _section(each: Figures, *, on_gpu: bool) -> str:
    parts = [f"### `{each['name']}`: {each['verdict']}", each["about"]]
    if each["told"]:
        parts.append(each["told"])
    if each["figures"]:
        rows = [("figure", "measured", "expected on a GPU", "")]
        rows += [
            (one["name"], one["shown"], _expected(one), "✗" if _is_missed(one, on_gpu=on_gpu) else "")
            for one in each["figures"]
        ]
        parts.append("\n".join(table(rows)))
    if each["output"]:
        parts.append(f"```text\n{each['output']}\n```")
    return "\n\n".join(part for part in parts if part)


def _is_missed(figure: Figures, *, on_gpu: bool) -> bool:
    return not figure["is_met"] and (on_gpu or figure["promised"])


def _expected(figure: Figures) -> str:
    return f"{figure['expected']} everywhere" if figure["promised"] else figure["expected"] or "–"
