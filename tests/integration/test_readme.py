"""Every Python block of the README runs, and every console block shows what its command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncpipe.observe.totals import COUNTERS, GAUGES, HISTOGRAMS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(3))
def test_python_blocks_run(number):
    code = blocks("python")[number]
    printed = run("-c", code)
    for line, wanted in re.findall(r"^(print\(.*\))\s+# (.*)$", code, flags=re.MULTILINE):
        assert wanted in printed, line


def test_no_block_is_left_out():
    assert len(blocks("python")) == 3


@pytest.mark.parametrize("block", blocks("console"))
def test_console_blocks_show_what_is_printed(block):
    command, _, shown = block.partition("\n")
    assert command.startswith("$ asyncpipe ")
    assert run("-m", "asyncpipe", *command.split()[2:]) == shown


def test_the_files_that_it_names_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_queries_ask_for_metrics_that_exist():
    asked = set(re.findall(r"asyncpipe_(\w+)", (ROOT / "dashboards" / "README.md").read_text(encoding="utf-8")))
    served = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {f"{name}_bucket" for name in HISTOGRAMS}
    assert asked <= served, asked - served
