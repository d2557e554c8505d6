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
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}


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


def test_no_block_is_left_out():
    counts = {page: len(blocks(page, "python")) for page in PAGES}
    assert counts["README.md"] == 5
    assert counts["recipes.md"] == 7
    assert counts["schedules.md"] == 3
    assert counts["watching.md"] == 4
    assert counts["processes.md"] == 5
    assert counts["hosts.md"] == 1
    assert counts["service.md"] == 2
    assert sum(len(blocks(page, "console")) for page in PAGES) == 4


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "console")])
def test_console_blocks_show_what_is_printed(block):
    command, _, shown = block.partition("\n")
    assert command.startswith("$ asyncpipe ")
    assert run("-m", "asyncpipe", *command.split()[2:]) == shown


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_it_names_are_there(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert (folder / target).exists(), target


def test_the_queries_ask_for_metrics_that_exist():
    asked = set(re.findall(r"asyncpipe_(\w+)", (ROOT / "dashboards" / "README.md").read_text(encoding="utf-8")))
    served = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {f"{name}_bucket" for name in HISTOGRAMS}
    for family in ServiceMetrics().collect():
        name = family.name.removeprefix("asyncpipe_")
        served |= {name, f"{name}_total", f"{name}_bucket"}
    assert asked <= served, asked - served
