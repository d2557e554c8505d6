"""The dashboards against Grafana's own types: TypeScript's compiler reads their JSON as literals of those types.

``tests/node/grafana/board.ts`` says what a dashboard may be. A key that Grafana does not know, a missing one, or a
value of another type is an error of the compiler.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NODE = ROOT / "tests" / "node"
COMPILER = NODE / "node_modules" / "typescript" / "bin" / "tsc"
BOARDS = {
    name: json.loads((ROOT / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("pipeline", "service")
}

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not on PATH; install Node.js 20 or later"),
    pytest.mark.skipif(
        not (COMPILER.exists() and (NODE / "node_modules" / "@grafana" / "schema").exists()),
        reason="tests/node has no packages yet: run `make node`",
    ),
]


def compiled(folder: Path, boards: dict[str, Any]) -> set[str]:
    """Those of the dashboards in which the compiler finds an error."""
    (folder / "node_modules").symlink_to(NODE / "node_modules")
    for source in ("board.ts", "tsconfig.json"):
        shutil.copy(NODE / "grafana" / source, folder)
    for name, found in boards.items():
        literal = json.dumps(found, indent=2)
        (folder / f"{name}.ts").write_text(
            f'import type {{ Board }} from "./board";\nexport const shown: Board = {literal};\n', encoding="utf-8"
        )
    done = subprocess.run(
        ["node", str(COMPILER), "--project", str(folder), "--pretty", "false"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error TS" in line]
    assert bool(errors) == (done.returncode != 0), done.stdout + done.stderr
    return {line.split(".ts(")[0].rpartition("/")[2] for line in errors}


def panel(board: dict[str, Any], kind: str) -> dict[str, Any]:
    """The first panel of that kind."""
    return next(found for found in board["panels"] if found["type"] == kind)


def fields(board: dict[str, Any], kind: str) -> dict[str, Any]:
    """Its settings of fields."""
    return panel(board, kind)["fieldConfig"]


def small() -> dict[str, Any]:
    """A dashboard with one panel of each kind, so that there is little to read for the compiler."""
    found = copy.deepcopy(BOARDS["pipeline"])
    found["panels"] = list({shown["type"]: shown for shown in found["panels"]}.values())
    return found


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknownKey": lambda board: board.update(schemaversion=42),
    "noVersion": lambda board: board.pop("schemaVersion"),
    "variableType": lambda board: board["templating"]["list"][0].update(type="datasources"),
    "variableKey": lambda board: board["templating"]["list"][0].update(auto_min="10s"),
    "panelKey": lambda board: panel(board, "stat").update(titel="x"),
    "panelKind": lambda board: panel(board, "stat").update(type="stats"),
    "optionKey": lambda board: panel(board, "timeseries")["options"]["legend"].update(show=True),
    "optionValue": lambda board: panel(board, "state-timeline")["options"].update(showValue="no"),
    "fieldSetting": lambda board: fields(board, "timeseries")["defaults"]["custom"].update(fill=1),
    "fieldType": lambda board: fields(board, "heatmap")["defaults"].update(unit=1),
    "override": lambda board: fields(board, "barchart")["overrides"][0]["properties"][0].update(id="colour"),
    "mapping": lambda board: fields(board, "state-timeline")["defaults"]["mappings"][0].update(type="map"),
    "query": lambda board: panel(board, "bargauge")["targets"][0].update(format="matrix"),
    "grid": lambda board: panel(board, "stat")["gridPos"].pop("h"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What the compiler refuses of the dashboards and of all that is wrong; once, since starting it takes seconds."""
    boards = {**BOARDS, **{name: small() for name in (*WRONG, "small")}}
    for name, spoil in WRONG.items():
        spoil(boards[name])
    return compiled(tmp_path_factory.mktemp("schema"), boards)


@pytest.mark.parametrize("board", [*BOARDS, "small"])
def test_grafana_has_a_type_for_all_that_a_dashboard_says(board, refused):
    assert board not in refused


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name, refused):
    assert name in refused
