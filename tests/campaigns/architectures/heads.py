"""The campaign of families and heads: each cut, trained a step in every way, and compared with the unsplit model.

A cell is where (threads, worker processes), the schedule, what is recomputed, and how the batch is laid out: padded, or
with several texts in a row (``position_ids``). The model's own loss of the whole batch in one call is what loss and
gradients are compared with, in float64.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe import DevicePool, Pipeline
from asyncpipe.ops.model.transformers.stage_transformers import stage_transformers
from tests.campaigns.architectures.in_float64 import in_float64
from tests.campaigns.architectures.judge import compared, told
from tests.campaigns.architectures.zoo_heads import HEADS, layouts
from tests.campaigns.harness import Campaign, Run, Verdict

__all__ = ["CAMPAIGN", "CELLS", "Cell", "judge_head"]

DEVICES = ["cpu:0", "cpu:1"]
SCHEDULES, CHECKPOINTS, LAYOUTS = (
    ("1f1b", "zb-h1", "interleaved"),
    ("always", "except_last", "never"),
    ("padding", "packing"),
)


class Cell(NamedTuple):
    """One way to train."""

    where: str
    schedule: str
    checkpoint: str
    layout: str


CELLS = [
    *(Cell("threads", *each) for each in product(SCHEDULES, CHECKPOINTS, LAYOUTS)),
    # Each schedule with one of them: what is recomputed is not decided where the workers are.
    *(Cell("processes", *each, layout) for each in zip(SCHEDULES, CHECKPOINTS, strict=True) for layout in LAYOUTS),
]
SHORT = [Cell("threads", "zb-h1", "always", layout) for layout in LAYOUTS]


def judge_head(name: str, cells: Sequence[Cell]) -> Iterator[str | Verdict]:
    """How the model is cut, and the verdict on each cell."""
    with warnings.catch_warnings(), in_float64():
        warnings.simplefilter("ignore")
        model, batch = HEADS[name].made()
        batches = layouts(model, batch)
        fresh = {key: value.clone() for key, value in model.state_dict().items()}
        expected = {layout: _unsplit(model, each) for layout, each in batches.items()}
        try:
            staged = stage_transformers(model, batch)
        except Exception as error:  # noqa: BLE001 - the finding
            yield from [told(error)] * len(cells)
            return
        yield f"{name}: cut by {'structure' if type(staged.stages[0]).__name__ == 'LayerStage' else 'trace'}"
        is_remote = any(cell.where == "processes" for cell in cells)
        with DevicePool(workers="processes") if is_remote else nullcontext() as pool:
            for cell in cells:
                if cell.layout not in batches:
                    yield Verdict("void", "takes no position_ids", label="-")
                    continue
                try:
                    if any(parameter.is_meta for parameter in model.parameters()):
                        # Its values have gone to workers.
                        model = HEADS[name].made()[0]
                        staged = stage_transformers(model, batch)
                    model.load_state_dict(fresh)
                    model.zero_grad()
                    loss, gradients = _trained(staged, model, batches[cell.layout], cell, pool)
                    yield _verdict(loss, gradients, *expected[cell.layout])
                except Exception as error:  # noqa: BLE001 - the finding
                    yield told(error)


def _unsplit(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    # With a cache transformers takes several texts in a row for one.
    options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    loss = model(**batch, **options).loss
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def _trained(
    staged: Any, model: nn.Module, batch: dict[str, Any], cell: Cell, pool: DevicePool | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step; of workers the gradients are what an optimizer has taken off the weights."""
    options: dict[str, Any] = {"stages": 4} if cell.schedule == "interleaved" else {}
    if cell.where == "processes":
        options |= {"pool": pool, "optimizer": one_step}
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    options |= {"microbatches": 4, "schedule": cell.schedule, "checkpoint": cell.checkpoint}
    with Pipeline(staged, DEVICES, **options).sync() as pipe:
        loss = pipe.step(dict(batch), return_outputs=False).loss
        assert loss is not None
        if cell.where == "processes":
            after = pipe.state_dict()
            return loss, {key: value - after[key] for key, value in before.items()}
    return loss, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def one_step(parameters: Any) -> torch.optim.Optimizer:
    """Takes the gradients off the weights; makes the worker compute in float64."""
    _always_float64(os.getpid())
    return torch.optim.SGD(parameters, lr=1.0)


@cache
def _always_float64(process: int) -> Any:
    context = in_float64()
    context.__enter__()  # For as long as the worker lives.
    return context


def _verdict(loss: Tensor, gradients: dict[str, Tensor], expected: Tensor, theirs: dict[str, Tensor]) -> Verdict:
    scale = 1 / max(float(g.abs().max()) for g in theirs.values())
    found = [compared("loss", loss.double(), expected.double())]
    for name in theirs.keys() | gradients.keys():
        found.append(compared(f"gradient of {name}", gradients.get(name), theirs.get(name), scale))
    wrong = [text for text, _ in found if text]
    return Verdict("wrong", "; ".join(wrong[:4])) if wrong else Verdict("right", f"{max(off for _, off in found):.1e}")


def _work(run: Run) -> None:
    importlib.import_module("transformers")  # Once, before processes are forked.
    names = run.options.only.split(",") if run.options.only else list(HEADS)
    cells = SHORT if run.options.short else CELLS
    rows: dict[str, list[tuple[Cell, Verdict]]] = {name: [] for name in names}
    how: dict[str, str] = {}
    tell, add = run.tell, run.add

    def note(text: str) -> None:
        name, _, cut = text.partition(": cut by ")
        how[name] = cut or how.get(name, "")
        tell(text)

    def keep(case: Any, verdict: Verdict) -> None:
        rows[case[0]].append((case[1], verdict))
        add(case, verdict)

    run.tell, run.add = note, keep  # type: ignore[method-assign]
    chunks = ([(name, cell) for cell in cells] for name in run.while_time(names))
    try:
        run.judge(chunks, lambda chunk: judge_head(chunk[0][0], [cell for _, cell in chunk]), run.options.seconds)
    finally:
        trained = [f"{name} {layout}" for name, cells in rows.items() for layout in LAYOUTS if _trains(cells, layout)]
        if run.options.trained:
            Path(run.options.trained).write_text("\n".join(trained) + "\n", encoding="utf-8")
        before = Path(run.options.before).read_text(encoding="utf-8").splitlines() if run.options.before else None
        run.report.tables += [*_counts(trained, before, len(rows)), *_table(rows, how)]


def _trains(cells: Sequence[tuple[Cell, Verdict]], layout: str) -> bool:
    """Whether such a batch trains in each way."""
    outcomes = [verdict.outcome for cell, verdict in cells if cell.layout == layout]
    return bool(outcomes) and set(outcomes) == {"right"}


def _counts(trained: Sequence[str], before: Sequence[str] | None, of: int) -> Iterator[str]:
    """How many train, and which did not before."""
    for layout in LAYOUTS:
        now = [each for each in trained if each.endswith(layout)]
        yield f"\n{layout}: {len(now)} of {of} train."
        if before is not None:
            new = [each.split()[0].replace(":", "For") for each in now if each not in before]
            lost = [each for each in before if each.endswith(layout) and each not in now]
            told = f" Before: {sum(each.endswith(layout) for each in before)}. New are {', '.join(new) or 'none'}."
            yield told.strip() + (f" No more: {', '.join(lost)}." if lost else "")


def _table(rows: dict[str, list[tuple[Cell, Verdict]]], how: dict[str, str]) -> Iterator[str]:
    """A row for each family and head: by where and layout, how many cells are right, and the largest difference."""
    columns = list(product(("threads", "processes"), LAYOUTS))
    yield f"\n| family | head | cut by | {' | '.join(f'{layout}, {where}' for where, layout in columns)} | refused |"
    yield f"|---|---|---|{'---|' * (len(columns) + 1)}"
    for name, judged in rows.items():
        shown = [_shown([v for cell, v in judged if (cell.where, cell.layout) == column]) for column in columns]
        refusals = sorted({verdict.text for _, verdict in judged if verdict.outcome == "refused"})
        family, head = name.split(":")
        yield f"| {family} | {head} | {how.get(name, '')} | {' | '.join(shown)} | {'; '.join(refusals)} |"


def _shown(verdicts: Sequence[Verdict]) -> str:
    verdicts = [verdict for verdict in verdicts if verdict.outcome != "void"]
    if not verdicts:
        return "-"
    right = [float(verdict.text) for verdict in verdicts if verdict.outcome == "right"]
    outcomes = sorted({verdict.outcome for verdict in verdicts} - {"right"})
    return (
        f"{len(right)} of {len(verdicts)}"
        + (f", {max(right):.0e}" if right else "")
        + "".join(f", {o}" for o in outcomes)
    )


CAMPAIGN = Campaign(
    "heads",
    _work,
    {
        "only": "",
        "short": (False, "two cells of each"),
        "trained": ("", "a file for the names of those that train"),
        "before": ("", "such a file of another commit, to compare with"),
        "seconds": (600.0, "for each family and head at most"),
        "processes": 1,
        "here": False,
    },
    repeat=lambda case: f"--only {case[0]}",
)
