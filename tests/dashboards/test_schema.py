"""The dashboards against Grafana's own types: TypeScript's compiler reads their JSON as literals of those types.

``tests/node/grafana/board.ts`` says what a dashboard may be. A key that Grafana does not know, a missing one, or a
value of another type is an error of the compiler.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
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


def test_grafana_has_a_type_for_all_that_a_dashboard_says(tmp_path):
    wrong = copy.deepcopy(BOARDS["service"])
    next(found for found in wrong["panels"] if found["type"] == "stat").update(titel="x")
    assert compiled(tmp_path, {**BOARDS, "wrong": wrong}) == {"wrong"}
