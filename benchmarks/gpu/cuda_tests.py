"""The tests that need a GPU: ``pytest -m cuda``, of whatever is in the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from benchmarks.gpu.environment import ROOT
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcome import Outcome, at_least, at_most, check, seen

__all__ = ["cuda_tests"]


def _files() -> list[str]:
    """Those with tests that need a GPU: collecting all tests would take longer than running these."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text()]


@check("Do the tests that need a GPU pass?", limit=120)
def cuda_tests(machine: Machine) -> Outcome:
    """On a CPU those of one file are collected and skipped.

    Without pytest-asyncio, a plugin beside this module runs coroutines.
    """
    files = _files() if machine.cuda else _files()[:1]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if find_spec("pytest_asyncio") is None:
        command += ["-o", "addopts=--import-mode=importlib", "-p", "benchmarks.gpu.coroutine_tests"]
    if machine.cuda and find_spec("xdist") is not None:
        command += ["-n", "6", "--dist", "worksteal"]
    command += ["--continue-on-collection-errors", "--maxfail=30"]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment, check=False)  # noqa: S603
        suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - pytest's own
    assert suite is not None
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    ran = count["tests"] - count["skipped"]
    return Outcome(
        [
            at_most("failed", count["failures"] + count["errors"], 0, "tests", promised=True),
            at_least("passed", ran - count["failures"] - count["errors"], 100, "tests"),
            seen("skipped", count["skipped"], "tests"),
        ],
        f"failed: {', '.join(wrong)}" if wrong else "",
    )
