"""Runs the rows of the table, or those that are named, and notes what each showed."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from tests.campaigns import service
from tests.campaigns.harness import Campaign, Run

__all__ = ["CAMPAIGN"]


def names() -> list[str]:
    """The rows that there are."""
    found = [module.name for module in pkgutil.iter_modules(service.__path__)]
    return [name for name in found if not name.startswith(("_", "test_", "campaign"))]


def _work(run: Run) -> None:
    run.report.tables += ["", "| done to the service | seen | held | seconds |", "|---|---|---|---|"]
    for name in run.while_time(run.options.only.split(",") if run.options.only else names()):
        begun = monotonic()
        with TemporaryDirectory(prefix=f"asyncpipe-{name}-") as folder:
            try:
                rows = importlib.import_module(f"tests.campaigns.service.{name}").run(Path(folder))
            except Exception as error:  # noqa: BLE001 - becomes a finding
                run.report.find(f"{name}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
                continue
        for row in rows:
            line = f"| {row.what} | {row.figure} | {'yes' if row.held else '**no**'} | {monotonic() - begun:.0f} |"
            run.report.tables.append(line)
            run.tell(line)
            if not row.held:
                run.report.find(f"{row.what}: {row.figure}", f"python -m tests.campaigns service --only {name}")


CAMPAIGN = Campaign("service", _work, {"minutes": 120.0, "only": ("", f"rows of {', '.join(names())}")}, is_quiet=False)
