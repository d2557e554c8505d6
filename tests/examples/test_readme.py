"""Every Python block of the README and of docs/ runs, and every console block shows what its command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import run_script

from asyncpipe.observe.metrics.metric_table import COUNTERS, GAUGES, HISTOGRAMS
from asyncpipe.service.jobs.service_metrics import ServiceMetrics

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix().removeprefix("docs/"): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], flags=re.DOTALL | re.MULTILINE)


PYTHON = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_python_blocks_run(page, number, tmp_path):
    code = blocks(page, "python")[number]
    status, printed, err = run_script(code, tmp_path)
    assert status == 0, err
    for line, wanted in re.findall(r"^ *(print\(.*\))\s+# (.*)$", code, flags=re.MULTILINE):
        assert wanted in printed, line


@pytest.mark.parametrize("language", ["python", "console"])
def test_no_block_is_left_out(language):
    counts = {page: len(blocks(page, language)) for page in PAGES}
    assert counts == {page: text.count(f"```{language}") for page, text in PAGES.items()}
    assert sum(counts.values()) >= 3


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "console")])
def test_console_blocks_show_what_is_printed(block):
    command, _, shown = block.partition("\n")
    assert command.startswith("$ asyncpipe ")
    assert run("-m", "asyncpipe", *command.split()[2:]) == shown


def test_the_queries_ask_for_metrics_that_exist():
    asked = set(re.findall(r"asyncpipe_(\w+)", (ROOT / "dashboards" / "README.md").read_text(encoding="utf-8")))
    served = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {f"{name}_bucket" for name in HISTOGRAMS}
    for family in ServiceMetrics().collect():
        name = family.name.removeprefix("asyncpipe_")
        served |= {name, f"{name}_total", f"{name}_bucket"}
    assert asked <= served, asked - served
