"""``python -m benchmarks gpu``: its checks have verdicts whatever becomes of their processes, and it runs on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_checks
import pytest

from benchmarks import gpu
from benchmarks.gpu import coroutine_tests, page
from benchmarks.gpu.apart import Server
from benchmarks.gpu.outcome import CHECKS, Outcome, at_least, at_most, judge, number, seen

ROOT = Path(gpu.__file__).parents[2]


def ran(*command, **variables):
    """The end of a program in the checkout."""
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_each_end_of_a_process_is_a_verdict(tmp_path):
    """A hang, an error and a signal cost their own check alone; the page and the JSON are there after each."""
    path = f"{ROOT}{os.pathsep}{Path(gpu_checks.__file__).parent}"
    ended = ran(sys.executable, gpu_checks.__file__, "--cpu", "--json", "--out", str(tmp_path), PYTHONPATH=path)
    assert ended.returncode == 1, ended.stderr
    found = json.loads(ended.stdout)
    rows = {row["name"]: row for row in found["checks"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    failed = dict.fromkeys(("wrong", "raises", "dies", "hangs"), "FAIL")
    assert verdicts == {"right": "PASS", "slow": "RAN", "on_gpu": "SKIP", **failed}
    assert rows["wrong"]["output"] == "before the end"
    assert rows["raises"]["output"].endswith("ValueError: no")
    assert rows["dies"]["told"].startswith("ended by SIGSEGV")
    assert rows["hangs"]["told"].startswith("killed after 1 s")
    assert "it hangs" in rows["hangs"]["output"]
    assert "gpu_checks.py" in rows["hangs"]["output"], "the stacks are told before it is killed"
    assert rows["on_gpu"]["told"] == "needs a GPU: a CPU has none"
    assert found["verdicts"] == {"PASS": 1, "FAIL": 4, "MISSED": 0, "RAN": 1, "SKIP": 1, "NOT RUN": 0}
    assert [line.split()[1] for line in ended.stderr.splitlines()[1:]] == list(rows)
    assert json.loads((tmp_path / "gpu.json").read_text())["verdicts"] == found["verdicts"]
    shown = (tmp_path / "gpu.md").read_text()
    assert re.search(r"\| a task +\| +80 µs +\| +≤ 25 µs +\| +\|", shown)
    assert re.search(r"\| wrong +\| +2 of 3 +\| +≤ 0 of 3 everywhere +\| +✗ +\|", shown)


@pytest.mark.parametrize(
    ("minutes", "told", "asked"),
    [(0.5, r"the time was over after \d+ s of it", [30.0]), (0.05, "the time was over", [])],
    ids=["cut off", "not begun"],
)
def test_what_there_is_no_time_for_is_not_run(monkeypatch, minutes, told, asked):
    monkeypatch.setattr(Server, "run", run := Runs())
    found = gpu.run(str, cpu=True, minutes=minutes, only=["host_ahead"])
    (row,) = found["checks"]
    assert row["verdict"] == "NOT RUN"
    assert re.fullmatch(told, row["told"])
    assert run.asked[1:] == [("host_ahead", pytest.approx(each, abs=20.0)) for each in asked]


class Runs:
    """In place of ``Server.run``: a machine, and processes that are killed."""

    def __init__(self):
        self.asked = []

    def __call__(self, name, gpus, limit):
        self.asked.append((name, limit))
        outcome = Outcome([seen("GPUs", 0)], "torch: 3") if name == "environment" else None
        return gpu.Ending(outcome, "killed", "", limit, outcome is None)


@pytest.mark.parametrize(
    ("figures", "on_cpu", "on_gpu"),
    [
        ([at_most("a", 1, 1), at_least("b", 2, 1)], "RAN", "PASS"),
        ([at_most("a", 2, 1), at_least("b", 0, 0, promised=True)], "RAN", "MISSED"),
        ([at_least("a", 0, 1, promised=True), at_most("b", 2, 1)], "FAIL", "FAIL"),
        ([at_most("a", float("nan"), 1, promised=True)], "FAIL", "FAIL"),
        ([at_most("a", 0, 1, promised=True)], "PASS", "PASS"),
    ],
)
def test_verdicts(figures, on_cpu, on_gpu):
    assert judge(Outcome(figures), on_gpu=False) == on_cpu
    assert judge(Outcome(figures), on_gpu=True) == on_gpu


def test_figures_have_three_digits():
    values = [0, 3, 1024, 0.1234, 12.34, 1234.5, 1e-12, float("inf")]
    assert [number(each) for each in values] == ["0", "3", "1024", "0.123", "12.3", "1234", "1.0e-12", "inf"]


def test_every_point_has_a_check_and_each_check_is_in_the_order():
    checks = gpu.load_checks()
    assert {item for each in checks.values() for item in each.items} == set(page.ITEMS)
    registered = {name for name, each in CHECKS.items() if each.run.__module__ in gpu.MODULES}
    assert registered - {"environment"} == set(checks)
    assert all(each.run.__doc__ for each in checks.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "graadients"], "only must be one of 'gradients'"),
        (["--only", "gradients"], "torch finds no CUDA device here; give --cpu"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr(Server, "run", Runs())
    with pytest.raises(gpu.OptionError, match=message):
        gpu.main([*arguments, "--out", str(tmp_path)])


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "annotated_types" else name)
    with pytest.raises(gpu.OptionError, match="pip install annotated-types"):
        gpu.run(str, cpu=True)


@pytest.mark.long
def test_coroutines_are_tests_without_the_plugin(tmp_path):
    (tmp_path / "test_it.py").write_text("async def test_it(tmp_path):\n    assert tmp_path.name == 'other'\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    command += ["-p", "no:asyncio", "-p", "no:cacheprovider", "-p", coroutine_tests.__name__]
    ended = ran(*command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "AssertionError" in ended.stdout
    assert "1 failed" in ended.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_runs_on_a_cpu(tmp_path):
    """What CPU devices can show is right, in a minute; the rest says why it is skipped."""
    options = ["--cpu", "--json", "--minutes", "4", "--out", str(tmp_path)]
    ended = ran(sys.executable, "-m", "benchmarks", "gpu", *options)
    rows = {row["name"]: row for row in json.loads(ended.stdout)["checks"]}
    assert ended.returncode == 0, [row for row in rows.values() if row["verdict"] == "FAIL"]
    assert list(rows) == gpu.ORDER
    assert {row["verdict"] for row in rows.values()} == {"PASS", "RAN", "SKIP"}
    assert all(row["told"].startswith("needs a GPU: ") for row in rows.values() if row["verdict"] == "SKIP")
    assert (tmp_path / "gpu.md").read_text().startswith("# 20")
