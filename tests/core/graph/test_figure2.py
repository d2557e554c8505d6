"""Figure 2 of the torchgpipe paper (arXiv 2004.09910), written out by hand: the graph is the truth."""

from __future__ import annotations

import json

import pytest

from asyncpipe.cli import main

# GPipe, 4 micro-batches, 3 stages, recomputation of all but the last. A line is a task, its device, and what it
# waits for with the reason. C(i,a>b) brings micro-batch i from stage a to stage b, and runs on the device of b.
FIGURE_2 = """
F(0,0)    dev:0
F(1,0)    dev:0   order F(0,0)
F(2,0)    dev:0   order F(1,0)
F(3,0)    dev:0   order F(2,0)

C(0,0>1)  dev:1   data F(0,0)
C(1,0>1)  dev:1   data F(1,0)
C(2,0>1)  dev:1   data F(2,0)
C(3,0>1)  dev:1   data F(3,0)

F(0,1)    dev:1   copy C(0,0>1)
F(1,1)    dev:1   copy C(1,0>1)   order F(0,1)
F(2,1)    dev:1   copy C(2,0>1)   order F(1,1)
F(3,1)    dev:1   copy C(3,0>1)   order F(2,1)

C(0,1>2)  dev:2   data F(0,1)
C(1,1>2)  dev:2   data F(1,1)
C(2,1>2)  dev:2   data F(2,1)
C(3,1>2)  dev:2   data F(3,1)

F(0,2)    dev:2   copy C(0,1>2)
F(1,2)    dev:2   copy C(1,1>2)   order F(0,2)
F(2,2)    dev:2   copy C(2,1>2)   order F(1,2)
F(3,2)    dev:2   copy C(3,1>2)   order F(2,2)

B(3,2)    dev:2   data F(3,2)
R(2,2)    dev:2   order B(3,2)
B(2,2)    dev:2   order B(3,2)    recompute R(2,2)
R(1,2)    dev:2   order B(2,2)
B(1,2)    dev:2   order B(2,2)    recompute R(1,2)
R(0,2)    dev:2   order B(1,2)
B(0,2)    dev:2   order B(1,2)    recompute R(0,2)

C(3,2>1)  dev:1   data B(3,2)
C(2,2>1)  dev:1   data B(2,2)
C(1,2>1)  dev:1   data B(1,2)
C(0,2>1)  dev:1   data B(0,2)

B(3,1)    dev:1   data F(3,1)     copy C(3,2>1)
R(2,1)    dev:1   order B(3,1)
B(2,1)    dev:1   order B(3,1)    recompute R(2,1)   copy C(2,2>1)
R(1,1)    dev:1   order B(2,1)
B(1,1)    dev:1   order B(2,1)    recompute R(1,1)   copy C(1,2>1)
R(0,1)    dev:1   order B(1,1)
B(0,1)    dev:1   order B(1,1)    recompute R(0,1)   copy C(0,2>1)

C(3,1>0)  dev:0   data B(3,1)
C(2,1>0)  dev:0   data B(2,1)
C(1,1>0)  dev:0   data B(1,1)
C(0,1>0)  dev:0   data B(0,1)

B(3,0)    dev:0   data F(3,0)     copy C(3,1>0)
R(2,0)    dev:0   order B(3,0)
B(2,0)    dev:0   order B(3,0)    recompute R(2,0)   copy C(2,1>0)
R(1,0)    dev:0   order B(2,0)
B(1,0)    dev:0   order B(2,0)    recompute R(1,0)   copy C(1,1>0)
R(0,0)    dev:0   order B(1,0)
B(0,0)    dev:0   order B(1,0)    recompute R(0,0)   copy C(0,1>0)
"""

COMMAND = "schedule show gpipe --stages 3 --microbatches 4 --checkpoint except_last --format json"


def test_the_command_prints_figure_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND.split()) == 0
    graph = json.loads(capsys.readouterr().out)
    rows = [line.split() for line in FIGURE_2.splitlines() if line]
    expected_tasks = sorted((row[0], row[1]) for row in rows)
    expected_edges = sorted(
        (dependency, row[0], reason) for row in rows for reason, dependency in zip(row[2::2], row[3::2], strict=True)
    )
    assert (len(expected_tasks), len(expected_edges)) == (49, 71)
    assert sorted((task["id"], task["device"]) for task in graph["tasks"]) == expected_tasks
    assert sorted((edge["from"], edge["to"], edge["reason"]) for edge in graph["edges"]) == expected_edges
