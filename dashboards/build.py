"""Writes the dashboards and the rules: ``python -m dashboards.build``; ``--check`` only reports files that differ.

::

    pipeline.py, details.py ─┐
    service.py, RUNBOOK.md ──┼──▶ build.py ──▶ pipeline.json, service.json, rules/asyncpipe.rules.yml
    rules.py ────────────────┘

The files are committed, so that Grafana can be provisioned without Python; a test builds them again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from asyncpipe.errors import OptionError
from dashboards import runbook
from dashboards.pipeline import pipeline
from dashboards.rules import rules_yaml
from dashboards.service import service

__all__ = ["FOLDER", "built", "main", "rendered"]

FOLDER = Path(__file__).parent


def built() -> dict[str, Dashboard]:
    """Both dashboards by name. Raises ``OptionError`` if a panel links to a runbook entry that does not exist."""
    markdown = runbook.RUNBOOK.read_text(encoding="utf-8")
    found = {"pipeline": pipeline(), "service": service(runbook.bands(markdown))}
    known = {f"Runbook: {entry}" for entry in runbook.entries(markdown)}
    for name, dashboard in found.items():
        for panel in _panels(dashboard):
            for link in panel.links or ():
                if link.title not in known:
                    raise OptionError(f"{panel.title!r} of {name} links to {link.title!r}, which is not in RUNBOOK.md")
    return found


def rendered() -> dict[str, str]:
    """The text of every generated file, by its path in this folder."""
    files = {
        f"{name}.json": json.dumps(_cleaned(dashboard), indent=2, ensure_ascii=False) + "\n"
        for name, dashboard in built().items()
    }
    return {**files, "rules/asyncpipe.rules.yml": rules_yaml()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all files, or with ``--check`` only compare them; 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description="Write dashboards and rules.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not up to date")
    check = parser.parse_args(arguments).check
    stale = 0
    for name, text in rendered().items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        sys.stdout.write(f"{name} is not up to date: run python -m dashboards.build\n" if check else f"wrote {name}\n")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and stale > 0)


def _panels(dashboard: Dashboard) -> Iterator[Panel]:
    return (panel for panel in dashboard.panels or () if isinstance(panel, Panel))


def _cleaned(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as JSON, without properties that the SDK adds where Grafana's schema does not have them.

    ``auto`` and its like belong to interval variables only, and the footer of a table to its fields. ``placement``
    would hide the links between the dashboards in a menu.
    """
    plain: dict[str, Any] = json.loads(JSONEncoder().encode(dashboard))
    for variable in plain["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):
            variable.pop(key, None)
    for panel in plain["panels"]:
        panel.get("options", {}).pop("footer", None)
    links = (panel.get("links", ()) for panel in plain["panels"])
    for placed in (plain["links"], plain["annotations"]["list"], *links):
        for entry in placed:
            entry.pop("placement", None)
    return plain


if __name__ == "__main__":
    sys.exit(main())
