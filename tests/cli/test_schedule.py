"""The ``asyncpipe schedule`` commands, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import asyncpipe.cli.schedule as command
from asyncpipe.cli import main
from asyncpipe.core.schedules.registry import known_schedules

Output = pytest.CaptureFixture[str]
SHOW = ("schedule", "show")


def show(capsys: Output, *arguments: str) -> str:
    assert main([*SHOW, *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_show_prints_the_simulated_timeline(capsys: Output) -> None:
    assert show(capsys, "1f1b", "--stages", "2", "--microbatches", "3") == (
        "1f1b: 2 stages on 2 devices, 3 micro-batches, checkpoint never, costs F=1 R=1 B=2 I=1 W=1 C=0\n"
        "\n"
        "time   0              5              10\n"
        "dev:0  F0 F1 ······B0─── F2 B1─── ···B2───\n"
        "dev:1  ···F0 B0─── F1 B1─── F2 B2─── ······\n"
        "\n"
        "makespan 12, bubble 25.0%, peak in flight 2 1 (stages 0 … 1)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "header"),
    [
        ("interleaved --stages 4", "interleaved: 4 stages on 2 devices, 2 micro-batches, checkpoint never"),
        ("interleaved --stages 3", "interleaved: 3 stages on 3 devices, 2 micro-batches, checkpoint never"),
        ("interleaved --stages 6 --virtual 3", "interleaved: 6 stages on 2 devices"),
        ("gpipe --devices 2", "gpipe: 2 stages on 2 devices"),
        ("interleaved --devices 2", "interleaved: 4 stages on 2 devices"),
        ("interleaved --devices 2 --virtual 3", "interleaved: 6 stages on 2 devices"),
        ("1f1b --devices 2 --order hint", "1f1b as hint: 2 stages on 2 devices"),
        ("gpipe --stages 1 --checkpoint always", "gpipe: 1 stage on 1 device, 2 micro-batches, checkpoint always"),
        ("gpipe --stages 2 --forward-only", "gpipe: 2 stages on 2 devices, 2 micro-batches, forward only, costs F=1"),
        (
            "gpipe --stages 2 --costs C=0.5,F=3",
            "gpipe: 2 stages on 2 devices, 2 micro-batches, checkpoint never, costs F=3 R=1 B=2 I=1 W=1 C=0.5",
        ),
    ],
)
def test_the_header_says_what_is_shown(capsys: Output, arguments: str, header: str) -> None:
    assert show(capsys, *arguments.split(), "--microbatches", "2").startswith(header)


def test_copies_have_rows_of_their_own_once_they_cost_time(capsys: Output) -> None:
    shape = ("gpipe", "--stages", "2", "--microbatches", "2")
    assert "copy-in" not in show(capsys, *shape)
    assert "  copy-in  " in show(capsys, *shape, "--costs", "C=1")


def test_a_file_gets_the_whole_width_and_a_terminal_what_fits_into_it(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, show(capsys, "gpipe", "--stages", "4", "--microbatches", "8").splitlines()[2:])) > 100
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert max(map(len, show(capsys, "gpipe", "--stages", "4", "--microbatches", "8").splitlines()[2:])) <= 60


def test_json_is_the_graph(capsys: Output) -> None:
    graph = json.loads(show(capsys, "gpipe", "--stages", "2", "--microbatches", "1", "--format", "json"))
    assert [task["id"] for task in graph["tasks"]] == ["F(0,0)", "C(0,0>1)", "F(0,1)", "B(0,1)", "C(0,1>0)", "B(0,0)"]
    assert {"from": "F(0,0)", "to": "C(0,0>1)", "reason": "data"} in graph["edges"]


def test_dot_and_svg_are_pictures(capsys: Output, tmp_path: Path) -> None:
    shape = ("gpipe", "--stages", "2", "--microbatches", "1")
    assert show(capsys, *shape, "--format", "dot").startswith("digraph step {")
    assert show(capsys, *shape, "--format", "svg", "--output", str(tmp_path / "step.svg")) == ""
    root = ElementTree.fromstring((tmp_path / "step.svg").read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_csv_is_the_notation_of_torch(capsys: Output) -> None:
    shape = ("--stages", "2", "--microbatches", "2", "--format", "csv")
    assert show(capsys, "1f1b", *shape).splitlines()[0].replace(",", " ").split() == ["0F0", "0F1", "0B0", "0B1"]


def test_several_schedules_come_one_after_the_other_as_text(capsys: Output) -> None:
    shape = ("--stages", "2", "--microbatches", "3")
    alone = [show(capsys, name, *shape) for name in ("gpipe", "1f1b")]
    assert show(capsys, "gpipe", "1f1b", *shape) == "\n".join(alone)


def test_html_compares_schedules(capsys: Output, tmp_path: Path) -> None:
    shape = ("--devices", "2", "--microbatches", "4", "--format", "html")
    assert show(capsys, "gpipe", "interleaved", *shape, "--output", str(tmp_path / "page.html")) == ""
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>2 schedules at the same costs, 4 micro-batches</title>" in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["gpipe", "interleaved"]
    assert 'class="detail">2 stages on 2 devices, 4 micro-batches, checkpoint never, costs F=1 ' in page
    assert 'class="detail">4 stages on 2 devices, 4 micro-batches, checkpoint never, costs F=0.5 ' in page
    alone = show(capsys, "gpipe", *shape)
    assert "<title>gpipe, 4 micro-batches</title>" in alone
    assert re.findall("<h2>(.*?)</h2>", alone) == ["gpipe"]


def test_the_stages_of_a_device_share_its_costs(capsys: Output) -> None:
    shape = ("--devices", "2", "--microbatches", "2")
    title = show(capsys, "interleaved", *shape, "--costs", "F=4,R=2,I=1,W=3,C=5").partition("\n")[0]
    assert title.endswith("costs F=2 R=1 B=2 I=0.5 W=1.5 C=5")
    title = show(capsys, "interleaved", *shape, "--costs", "B=3").partition("\n")[0]
    assert title.endswith("costs F=0.5 R=0.5 B=1.5 I=0.5 W=0.5 C=0")


def test_list_names_every_schedule_and_what_it_does(capsys: Output) -> None:
    assert main(["schedule", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == known_schedules()
    assert all(len(line.split()) > 3 for line in lines)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("asyncpipe ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpipe --devices 2 --microbatches 1 --virtual 2", "schedule 'gpipe' puts one stage on each device"),
        ("interleaved gpipe --stages 4 --microbatches 4 --virtual 2", "schedule 'gpipe' puts one stage on each device"),
        ("gpipe nope --stages 2 --microbatches 2 --format html", "unknown schedule 'nope'"),
        (
            "gpipe 1f1b --stages 2 --microbatches 2 --format svg",
            "--format svg shows one schedule, got 2; text and html",
        ),
        (
            "gpipe 1f1b --stages 2 --microbatches 2 --format csv",
            "--format csv shows one schedule, got 2; text and html",
        ),
        ("1f1b --stages 2 --microbatches 2 --format csv --forward-only", "--format csv holds whole steps; leave --for"),
        ("1f1b --stages 2 --microbatches 2 --format csv --order hint", "schedule '1f1b as hint' decides by a rule"),
        ("gpipe --stages 2 --microbatches 1 --output /nowhere/x", "cannot write /nowhere/x: No such file or directory"),
    ],
)
def test_errors_are_one_line_and_status_2(capsys: Output, arguments: str, message: str) -> None:
    assert main([*SHOW, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"asyncpipe: error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["schedule"],
        ["simulate", "gpipe", "--stages", "2", "--microbatches", "2", "--costs", "F=1", "--profile", "x"],
        ["simulate", "gpipe", "--stages", "2", "--microbatches", "0"],
        ["simulate", "gpipe", "--stages", "2", "--microbatches", "2", "--balance", "1,x"],
        ["simulate", "gpipe", "--stages", "2", "--microbatches", "2", "--offload", "x"],
        ["simulate", "gpipe", "--stages", "2", "--microbatches", "2", "--steps", "2", "--ahead", "-1"],
        ["simulate", "gpipe", "--stages", "2", "--microbatches", "2", "--repeat", "0"],
        [*SHOW],
        [*SHOW, "gpipe", "--stages", "two"],
        [*SHOW, "gpipe", "--microbatches", "2", "--devices", "0"],
        [*SHOW, "gpipe", "--microbatches", "2", "--devices", "2", "--virtual", "0"],
        [*SHOW, "gpipe", "--microbatches", "2"],
        [*SHOW, "gpipe", "--microbatches", "2", "--stages", "2", "--devices", "2"],
        [*SHOW, "gpipe", "--microbatches", "2", "--stages", "2", "--order", "loose"],
    ],
)
def test_a_wrong_command_line_prints_the_usage(capsys: Output, arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("usage: asyncpipe")


def test_an_interrupt_ends_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "known_schedules", interrupt)
    assert main(["schedule", "list"]) == 130


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command_line = [sys.executable, "-m", "asyncpipe", *SHOW, "gpipe", "--stages", "2", "--microbatches", "2"]
    # Unbuffered output would fail at once; the usual, buffered one only when it is flushed.
    buffered = {key: text for key, text in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(command_line, env=buffered, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_showing_a_schedule_imports_no_torch() -> None:
    code = (
        "import sys, asyncpipe.cli\n"
        "assert not {'torch'} & sys.modules.keys(), 'on import'\n"
        "for form in ('text', 'svg', 'html', 'csv'):\n"
        "    line = f'schedule show gpipe --stages 2 --microbatches 2 --format {form}'\n"
        "    assert asyncpipe.cli.main(line.split()) == 0\n"
        "assert not {'torch', 'prometheus_client'} & sys.modules.keys(), 'after show'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
