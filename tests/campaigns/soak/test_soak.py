"""The short form of the soak, and tests of its parts: the trend, the samples, the fault board and the report."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from torch import nn

pytest.importorskip("fastapi", reason="a service needs FastAPI: pip install -e '.[service]'")

from tests.campaigns.soak import report, samples
from tests.campaigns.soak.soak import SoakSize, run_soak
from tests.campaigns.soak.workload import NOBODY, FaultBoard


@pytest.mark.timeout(240)
def test_a_soak_finds_its_service_in_order():
    size = SoakSize(seconds=8, sample_every=1, fault_every=0.25, scrape_every=1, watchdog_floor=2)
    figures = json.loads(json.dumps(run_soak(size, lambda _: None)))
    assert not figures["interrupted"]
    assert figures["jobs"]["illegal_histories"] == figures["jobs"]["torn_curves"] == []
    assert figures["surprises"] == {}
    assert figures["last_job"] == "finished"
    assert figures["doubled_threads"] == figures["threads_left"] == []
    assert min(fault["dealt"] for fault in figures["faults"].values()) > 0
    assert {"foreground of weight 3", "background", "small"} <= set(figures["jobs"]["states"])
    assert {name: len(values) for name, values in figures["samples"].items()} == dict.fromkeys(
        figures["samples"], len(figures["times"])
    )
    assert "| hung task |" in report.markdown(figures)


@pytest.mark.parametrize(("growing", "verdict"), [(0.0, "no growth"), (-3.0, "no growth"), (3.0, "growth")])
def test_growth_is_found_in_noise_and_only_where_it_is(growing, verdict):
    random = Random(3)
    times = [10.0 * number for number in range(180)]
    values = [500 + random.gauss(0, 1) + growing * time / 600 for time in times]
    found = samples.trend(times, values)
    assert found["verdict"] == verdict
    assert abs(found["slope"] - growing * 6) < 1.5 * found["uncertainty"]
    assert found["least"] == min(values)


def test_what_happened_in_the_first_third_is_no_growth():
    times = [float(number) for number in range(90)]
    assert samples.trend(times, [min(time, 30.0) for time in times])["verdict"] == "no growth"
    assert samples.trend(times[:7], times[:7])["verdict"] == "too short"
    assert samples.trend(times, times)["verdict"] == "growth"


def test_samples_that_follow_each_other_know_less():
    random = Random(2)
    times = [float(number) for number in range(200)]
    independent = [random.gauss(0, 1) for _ in times]
    # Each of 20 values ten times: as much spread, and a tenth of the knowledge.
    slow = [independent[number // 10 * 10] for number in range(200)]
    assert samples.slope(times, slow).error > 2 * samples.slope(times, independent).error
    assert samples.slope(times, [7.0] * 200) == (0.0, 0.0)
    assert samples.slope(times, times).value == pytest.approx(1.0)


def test_a_line_of_bars_shows_where_it_goes_up():
    assert samples.spark([0, 0, 1, 2]) == "▁▁▅█"
    assert samples.spark([5.0] * 3) == "▁▁▁"
    assert samples.spark([float(n) for n in range(600)], width=8) == "▁▂▃▄▅▆▇█"


def test_what_is_measured_of_a_process():
    async def waiting():
        await asyncio.sleep(0)

    while gc.collect():  # What other tests have left, and their finalizers after that, must not go between the two.
        pass
    held = samples.measure()
    kept = [nn.Parameter(torch.zeros(1)) for _ in range(100)], [waiting() for _ in range(30)], bytearray(2**24)
    with ThreadPoolExecutor(1, thread_name_prefix="asyncio") as pool:
        pool.submit(int).result()
        more = samples.measure()
    assert more["tensors"] - held["tensors"] == 100
    assert more["coroutines"] - held["coroutines"] == 30
    assert more["objects"] - held["objects"] > 100
    for coroutine in kept[1]:
        coroutine.close()
    assert held["threads"] + held["pooled"] == threading.active_count()
    assert more["threads"] == held["threads"]
    assert more["pooled"] == held["pooled"] + 1
    if "heap" in held:
        assert more["heap"] - held["heap"] == pytest.approx(16, abs=1)


def test_one_job_takes_all_of_a_fault():
    board = FaultBoard()
    assert not board.take("stage raises", owner=1)
    board.arm("stage raises", 2)
    assert not board.take("stage raises", owner=NOBODY)
    assert not board.take("out of memory", owner=1)
    assert board.take("stage raises", owner=1)
    assert not board.take("stage raises", owner=2)
    assert board.take("stage raises", owner=1)
    assert not board.take("stage raises", owner=1)
    assert board.taken == {"stage raises": 2}


def test_a_report_says_first_what_is_not_in_order():
    figures = _soak_figures()
    assert "| small: a b¦c | 2 |" in report.markdown(figures)
    assert report.problems(figures) == []
    assert report.summary(figures).endswith("all in order")
    figures |= {"last_job": "failed", "threads_left": ["asyncpipe cpu:0"], "surprises": {"KeyError: 1": 3}}
    figures["jobs"] |= {"illegal_histories": ["a: oh"], "torn_curves": ["b"]}
    assert len(report.problems(figures)) == 5
    assert "- not in order: **5**\n  - the history of a: oh\n" in report.markdown(figures)


def _soak_figures():
    trend = samples.trend([1.0, 2.0], [3.0, 4.0])
    return {
        "seconds": 60.0,
        "interrupted": True,
        "times": [1.0, 2.0],
        "samples": {"threads": [3.0, 4.0]},
        "trends": {"threads": trend},
        "faults": {"hung task": {"dealt": 1, "taken": 0}},
        "jobs": {"states": {"small": {"finished": 1}}, "attempts": 1, "causes": {"small: a\nb|c": 2}}
        | {"illegal_histories": [], "torn_curves": []},
        "done": {},
        "refused": {},
        "surprises": {},
        "last_job": "finished",
        "hung_tasks": 0.0,
        "doubled_threads": [],
        "threads_left": [],
        "status": "takes jobs",
        "log": {},
    }
