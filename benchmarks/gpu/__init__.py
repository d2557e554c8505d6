"""What only a GPU can show, in nine minutes: ``python -m benchmarks gpu``, and ``--cpu`` for what runs without one.

Every check runs in a process of its own with a time limit of its own, and prints its verdict with its figures, beside
what was expected of them, as soon as it ends. All of them make a page for ``docs/results``. One GPU is enough: it is
listed as several devices. The cheap and decisive ones come first, the U-Nets last; after ``--minutes`` the rest is
listed as not run. Nothing is needed but the checkout and what ``pip install -e .`` installs in it::

    outcome.py          figures, what was expected of them, verdicts; ``check`` registers a question
    apart.py            the process of a check
    machine.py          what a check is given: devices, how to keep them busy, how to time them
    models.py           the models of the checks
    environment.py      what is measured on
    cuda_tests.py       the tests that need a GPU
    values.py           losses, gradients and draws are those without a pipeline
    faults.py           errors, and jobs side by side
    tasks.py            the host's part
    overlap.py          what runs beside what, and the clock
    between_workers.py  messages between processes
    graphs.py           compiled stages and CUDA graphs
    memory.py           memory, against the planner's
    training.py         whole models against plain torch
    language.py         a model with a device_map
    page.py             the page

A check that expects a number of a GPU says in its docstring where the number comes from. To add one: a function with
``@check`` in one of these files, and its name in ``ORDER``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncpipe.bench import Figures, Progress
from asyncpipe.core.checks import check_choice
from asyncpipe.errors import OptionError
from benchmarks.gpu import page
from benchmarks.gpu.apart import Ending, Server
from benchmarks.gpu.outcome import CHECKS, VERDICTS, Check, Outcome, as_json, judge

__all__ = ["ORDER", "load_checks", "main", "run", "show"]

MODULES = tuple(
    f"benchmarks.gpu.{name}"
    for name in (
        *("environment", "cuda_tests", "values", "faults", "tasks", "overlap", "between_workers", "graphs", "memory"),
        *("training", "language"),
    )
)
ORDER = """
    gradients task_cost host_bound_step stage_alone host_waits host_ahead completion steps_overlap pinned_batch
    inputs_beside_compute edges_on_one_gpu edges_of_two_gpus other_gpu tiny_tasks many_parameters memory_in_flight
    memory_by_plan journal_clocks counted_loss cpu_stage_inputs cpu_normalizer replayed_draws
    draws_beside_checkpoint dropin_streams dropin_warnings sticky_error hung_kernel stage_graphs callers_graphs
    cuda_tests gpt2_small threads_or_processes auto_workers compile_seconds copy_overlap memory_growth two_jobs
    compiled_stages device_map unet_small unet_throughput unet_parameters
""".split()
"""Cheap and decisive first."""
MINUTES = 9.0
LEAST = 5.0
"""Seconds that must be left for another check to begin."""
ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("build", "gpu")

show = page.show


def load_checks() -> dict[str, Check]:
    """All checks by name, in the order in which they run. Imports torch."""
    from importlib import import_module

    for module in MODULES:
        import_module(module)
    return {name: CHECKS[name] for name in ORDER}


def missing_packages() -> list[str]:
    """The packages that ``asyncpipe`` needs and this Python lacks, by the names that pip has for them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.split(r"[^\w-]", each, maxsplit=1)[0] for each in declared]
    return [name for name in names if find_spec(name.replace("-", "_")) is None]


def run(
    progress: Progress,
    *,
    cpu: bool = False,
    only: Sequence[str] = (),
    minutes: float = MINUTES,
    out: Path | None = None,
) -> Figures:
    """The verdict and the figures of each check, which are also written to ``out`` after each.

    Raises ``OptionError`` for an unknown name in ``only``, for packages that are missing, and without ``cpu`` where
    torch finds no GPU.
    """
    if missing := missing_packages():
        raise OptionError(f"asyncpipe needs packages that this Python lacks; pip install {' '.join(missing)}")
    for name in only:
        check_choice("only", name, tuple(ORDER))
    began = time.monotonic()
    until = began + 60 * minutes
    progress("importing torch and the checks")
    checks = load_checks()
    server = Server(MODULES)
    surroundings = server.run("environment", 0, 60.0)
    if surroundings.outcome is None:
        raise OptionError(f"the check's processes do not run: {surroundings.told}\n{surroundings.output}")
    gpus = int(surroundings.outcome.figures[0].measured)
    if not gpus and not cpu:
        raise OptionError("torch finds no CUDA device here; give --cpu for what CPU devices can show")
    found: Figures = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"python -m benchmarks gpu{' --cpu' if cpu else ''}{' --only ' + ' '.join(only) if only else ''}",
        "environment": dict(line.split(": ", 1) for line in surroundings.outcome.text.splitlines()),
        "gpus": 0 if cpu else gpus,
        "checks": [],
    }
    for name in only or ORDER:
        row = _row(checks[name], server, found["gpus"], until - time.monotonic())
        found["checks"].append(row)
        progress(_line(row))
        found["seconds"] = time.monotonic() - began
        found["verdicts"] = {
            verdict: sum(each["verdict"] == verdict for each in found["checks"]) for verdict in VERDICTS
        }
        if out is not None:
            _write(out, found)
    return found


def _row(check: Check, server: Server, gpus: int, left: float) -> dict[str, Any]:
    """What became of the check, in the time that is left."""
    row: dict[str, Any] = {
        "name": check.name,
        "question": check.question,
        "about": " ".join((check.run.__doc__ or "").split()),
        "items": check.items,
        "figures": [],
        "seconds": 0.0,
        "output": "",
    }
    if check.needs_gpu and not gpus:
        return {**row, "verdict": "SKIP", "told": f"needs a GPU: {check.needs_gpu}"}
    if gpus and gpus < check.gpus:
        return {**row, "verdict": "SKIP", "told": f"needs {check.gpus} GPUs, and there is {gpus}"}
    if left < LEAST:
        return {**row, "verdict": "NOT RUN", "told": "the time was over"}
    ending = server.run(check.name, gpus, min(check.limit, left))
    row["seconds"] = ending.seconds
    if ending.was_late and left < check.limit:
        told = f"the time was over after {left:.0f} s of it"
        return {**row, "verdict": "NOT RUN", "told": told, "output": ending.output}
    return {**row, **_ended(ending, on_gpu=gpus > 0)}


def _ended(ending: Ending, *, on_gpu: bool) -> dict[str, Any]:
    if ending.outcome is None:
        return {"verdict": "FAIL", "told": ending.told, "output": ending.output}
    outcome: Outcome = ending.outcome
    verdict = judge(outcome, on_gpu=on_gpu)
    return {
        "verdict": verdict,
        "told": outcome.text,
        "figures": [as_json(each) for each in outcome.figures],
        "output": ending.output if verdict == "FAIL" else "",
    }


def _line(row: Figures) -> str:
    """For a person who watches."""
    told = [
        f"{each['name']} {each['shown']}" + (f" ({each['expected']})" if each["expected"] else "")
        for each in row["figures"]
    ]
    text = "; ".join([*told, *([row["told"][:300]] if row["told"] else [])])
    return f"{row['verdict']:7} {row['name']} ({row['seconds']:.1f} s): {text}"


def _write(out: Path, found: Figures) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (out / "gpu.md").write_text(page.show(found) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """The command; 1 if something failed."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks gpu",
        description="Prove or refute on a GPU, in nine minutes, what only a GPU can show; see benchmarks/gpu.",
    )
    parser.add_argument("--cpu", action="store_true", help="use CPU devices, for what they can show")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=(), help=f"only these checks: {' '.join(ORDER)}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="end after so many minutes (default: 9)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or FOLDER),
        metavar="FOLDER",
        help=f"where gpu.md and gpu.json are written after each check (default: $OUT, or {FOLDER})",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page there as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    options = parser.parse_args(arguments)
    found = run(
        lambda text: print(text, file=sys.stderr, flush=True),
        cpu=options.cpu,
        only=options.only,
        minutes=options.minutes,
        out=options.out,
    )
    if options.page is not None:
        options.page.write_text(page.show(found) + "\n", encoding="utf-8")
    print(json.dumps(found) if options.json else page.show(found))
    return int(found["verdicts"]["FAIL"] > 0)
