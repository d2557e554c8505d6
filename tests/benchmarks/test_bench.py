"""The benchmarks: tiny forms run, counted bytes are right, and what is wrong in their options is said."""

from __future__ import annotations

import json
import math
import time
from importlib import import_module

import pytest
import torch
from torch import nn

from asyncpipe.bench import BENCHMARKS, overhead, pipeline, sharing
from asyncpipe.bench.real_tasks import RealTasksSize, stage_seconds
from asyncpipe.cli import main
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import simulate_steps
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.edges.connect import HOST_TRANSPORTS
from benchmarks import __main__ as command
from benchmarks import edges, examples, metrics, unet
from benchmarks import many_steps as many
from benchmarks.byte_counters import ByteMeter
from benchmarks.unet import memory as unet_memory
from benchmarks.unet import speed as unet_speed

CPU = resolve_devices(["cpu:0"])[0]
UNET = unet_memory.UNetMemorySize(depth=2, convs=1, channels=8, image=16, samples=8, microbatches=8, searched=(1, 2))


def quiet(_: str) -> None:
    """Nobody wants to see the progress."""


# The commands


@pytest.mark.parametrize("names", [BENCHMARKS, command.SUITE.benchmarks])
def test_every_benchmark_is_listed_and_has_run_and_show(names, capsys):
    for name in names:
        module = import_module(f"asyncpipe.bench.{name}" if names is BENCHMARKS else f"benchmarks.{name}")
        assert callable(module.run), name
        assert callable(module.show), name
    assert command.main([]) == 0
    assert all(name in capsys.readouterr().out or names is BENCHMARKS for name in list(names)[:1])


@pytest.mark.parametrize(
    ("suite", "arguments", "message"),
    [
        (command.main, ["unet", "--size", "huge"], "size must be one of 'small', 'paper', got 'huge'"),
        (command.main, ["metrics", "--size", "small"], "the benchmark 'metrics' has no --size; it has no options"),
        (command.main, ["unet", "--device", "tpu"], "'tpu' is no device"),
        (command.main, ["unet", "--device", "cuda:99"], "'cuda:99' is not there"),
        (command.main, ["many_steps", "--steps", "0"], "--steps must be an integer of at least 1, got 0"),
        (command.main, ["many_steps", "--cases", "fine,huge"], "case must be one of 'fine', 'charlm', got 'huge'"),
        (main, ["bench", "plan", "--repeats", "3"], "the benchmark 'plan' has no --repeats; it has no options"),
        (main, ["bench", "peers", "--cases", "tiny,huge"], "case must be one of 'tiny', 'fine', 'mid', 'coarse', 'tra"),
        (main, ["bench", "peers", "--contestants", "gpipe"], "contestant must be one of 'plain', 'bare', 'step', 'dro"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(capsys, suite, arguments, message):
    assert suite(arguments) == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_benchmark(capsys, monkeypatch):
    monkeypatch.setattr(unet, "run", lambda progress, **options: {"options": options})
    assert command.main(["unet", "--size", "paper", "--device", "cpu:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == {"device": "cpu:1", "size": "paper"}


def test_benchmarks_of_examples_say_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "benchmarks" / "examples.py"))
    examples.load_example.cache_clear()
    with pytest.raises(OptionError, match="from examples/charlm, and there is no"):
        metrics.run(quiet)


# pipeline, overhead, many_steps


def test_a_pipeline_is_compared_with_its_bound(monkeypatch):
    for name, value in {"WIDTH": 8, "SAMPLES": 32, "ROUNDS": 1, "WARM_UP": 0}.items():
        monkeypatch.setattr(pipeline, name, value)
    figures = json.loads(json.dumps(pipeline.run(quiet)))
    assert figures["step_over_bound"] > 1
    assert "speed-up over one device" in pipeline.show(figures)


def test_overhead_measures_tasks_and_graphs():
    graphs = {"devices": (2, 4), "steps": 2, "warm_up": 1, "graph_stages": 4, "graph_microbatches": (4, 8)}
    real = RealTasksSize(width=8, layers=1, microbatches=4, rows=2, warm_up=0, rounds=2)
    figures = json.loads(json.dumps(overhead.run(quiet, size=overhead.OverheadSize(**graphs, real=real))))
    assert [row["devices"] for row in figures["devices"]] == [2, 4]
    assert figures["us_per_task"] == figures["devices"][1]["us_per_task"] > 0
    # F and B of 4 micro-batches on each device, and a copy each way between neighbours.
    assert [row["tasks"] for row in figures["real"]["devices"]] == [24, 56]
    assert all(row["us_per_task_by_cores"] <= row["us_per_task"] for row in figures["real"]["devices"])
    assert "µs per task" in overhead.show(figures)


def test_steps_in_a_row_train_in_both_ways(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    batch = torch.ones(4, 4), torch.zeros(4, 4)
    options = {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    case = many.ManySteps("two layers", 2, lambda: model, lambda count: [batch] * count, lambda: options)
    monkeypatch.setattr(many, "MANY_STEPS", {"small": lambda: case})
    figures = json.loads(json.dumps(many.run(quiet, steps=4, repeats=2)))
    for row in figures["cases"]["small"]["step"], figures["cases"]["small"]["steps"]:
        assert row["seconds"] > 0
        assert 0 <= row["first_idle"] < 1
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert "4 steps in a row, medians of 2 turns" in many.show(figures)


def test_idle_shares_and_borders_of_steps_in_a_row():
    def found(schedule: str, ahead: int):
        graph = lower(find_schedule(schedule), Shape(2, 4, 2), devices=["cpu:0", "cpu:1"])
        costs = Costs(forward=1.0, backward=2.0, input_gradient=1.0, weight_gradient=1.0)
        return many.devices_idle(simulate_steps(graph, costs, steps=3, ahead=ahead))

    # The last device waits for the first one's last backward and its next forward, however early steps begin.
    for ahead in (0, 1):
        idle, borders = found("1f1b", ahead)
        assert idle == pytest.approx({"cpu:0": 0.2, "cpu:1": 0.2})
        assert borders == pytest.approx({"cpu:0": 0.0, "cpu:1": 3.0})
    # Here it has work to put off until then.
    assert found("zb-h2", 0)[1] == pytest.approx({"cpu:0": 1.0, "cpu:1": 1.0})
    assert found("zb-h2", 1)[1] == pytest.approx({"cpu:0": 0.0, "cpu:1": 0.0})


# edges


def test_edges_measures_each_way_to_send_by_size():
    size = edges.EdgesSize(bytes=(1 << 10, 1 << 20), rounds=2, warm_up=0, messages_at_most=3)
    figures = json.loads(json.dumps(edges.run(quiet, size=size)))
    assert figures["arms"] == [edges.BARE, "shared_memory, taken", *HOST_TRANSPORTS]
    assert list(figures["us_a_message"]) == ["1 KiB", "1 MiB"]
    for ways in figures["us_a_message"].values():
        assert list(ways) == ["to and fro", "one way"]
        for arms in ways.values():
            assert list(arms) == figures["arms"]
            assert min(arms.values()) > 0
    assert len(edges.show(figures).splitlines()) == 2 * 3 + 1


def test_the_plain_loops_stages_are_timed_one_by_one():
    class Slow(nn.Linear):
        def forward(self, x):
            started = time.perf_counter()
            while time.perf_counter() < started + 0.01:
                pass
            return super().forward(x)

    stages = [nn.Linear(4, 4), Slow(4, 4), nn.Linear(4, 4)]
    seconds = stage_seconds(stages, torch.randn(6, 4), torch.randn(6, 4), 3)
    assert seconds[1] >= 0.03
    assert min(seconds) > 0
    assert all(parameter.grad is None for stage in stages for parameter in stage.parameters())


# metrics


def test_metrics_are_compared_with_training_without_them():
    size = metrics.TrainingSize(seconds=0.1, rounds=2, period=0.04, warm_up=1, text_bytes=50_000)
    figures = json.loads(json.dumps(metrics.run(quiet, size=size)))
    assert figures["scrapes"] >= size.rounds
    assert len(figures["ratios"]) == size.rounds
    assert figures["tasks"] > 0
    assert min(figures["plain_seconds"], figures["metrics_seconds"], figures["ratio"]) > 0
    assert f"({figures['scrapes']} scrapes)" in metrics.show(figures)


# unet


def test_a_byte_meter_counts_storages_until_they_are_freed():
    meter = ByteMeter()
    with meter.counting():
        x = torch.zeros(100)
        view = x.view(10, 10)[2:]
        assert meter.live == 400
        y = (view + 1).sum()  # 80 numbers for a moment, then one.
    assert (meter.live, meter.peak) == (404, 400 + 320 + 4)
    outside = torch.ones(7)
    assert meter.live == 404
    meter.add(outside)
    del x
    assert meter.live == 404 + 28
    del view
    assert meter.live == 32
    meter.restart()
    assert meter.peak == meter.live == 32
    del outside, y
    assert meter.live == 0


@pytest.mark.parametrize("way", [None, unet_memory.STEP, unet_memory.OTHERS[0]], ids=["bare", "except_last", "never"])
def test_bytes_are_the_same_without_values(way):
    counted = [unet_memory.counted_peak(UNET, 2, 8, way, CPU, values=values) for values in (True, False)]
    assert counted[0] == counted[1]


def test_the_largest_unet_fits_and_the_next_one_does_not():
    figures = json.loads(json.dumps(unet_memory.run(quiet, CPU, UNET, values=True)))
    limit = figures["bare"]["peak_bytes"]
    assert [row["convs"] for row in figures["pipelines"]] == [1, 2]
    for row in figures["pipelines"]:
        assert row["peak_bytes"] <= limit
        more = unet_memory.counted_peak(UNET, row["convs"], row["channels"] + 2, unet_memory.STEP, CPU)
        assert more > limit
    best = max(figures["pipelines"], key=lambda row: row["parameters"])
    assert figures["ratio"] == best["parameters"] / figures["bare"]["parameters"]
    assert 1 < figures["ratio"] < figures["most_possible"]
    never, dropped_in = figures["other_ways"]
    # One stage in 1F1B holds one micro-batch at a time, recomputed or not.
    assert never["peak_bytes"] == pytest.approx(best["peak_bytes"], rel=0.05)
    assert dropped_in["peak_bytes"] == pytest.approx(best["peak_bytes"], rel=0.05)
    assert "step, never" in unet_memory.show(figures)


def test_the_search_finds_the_border_whatever_the_peaks():
    def search(peak, limit):
        asked = []
        found = unet_memory.largest_channels(
            lambda channels: asked.append(channels) or peak(channels), lambda channels: channels**2, limit
        )
        return found, asked

    (channels, peak), asked = search(lambda c: 8 * c**2 + 100 * c, limit=100_000)
    assert (channels, peak) == (104, 8 * 104**2 + 100 * 104)
    assert len(asked) <= 4
    # Far above what parameters need, and a machine that runs out of memory.
    found, asked = search(lambda c: 8 * c**2 + (0 if c <= 30 else float("inf")), limit=100_000)
    assert found == (30, 7200)
    assert len(asked) <= 20, asked
    assert search(lambda c: 8 * c**2 + 50_000, limit=100_000)[0] == (78, 98_672)
    assert search(lambda c: 1e9, limit=100_000)[0] == (0, 0.0)
    assert search(lambda c: 0, limit=1)[0] == (0, 0.0)


def test_unet_measures_every_arm_against_the_bare_model():
    speed = unet_speed.UNetSpeedSize(depth=1, convs=1, channels=4, image=8, samples=2, warm_up=0, rounds=2)
    memory_size = unet_memory.UNetMemorySize(
        depth=1, convs=1, channels=4, image=8, samples=4, microbatches=4, searched=(1,)
    )
    figures = json.loads(json.dumps(unet.run(quiet, speed_size=speed, memory_size=memory_size)))
    arms = {row["checkpoint"]: row for row in figures["speed"]["arms"]}
    assert [round(arms[mode]["bound"], 3) for mode in ("never", "except_last", "always")] == [1.0, 0.857, 0.75]
    assert all(row["step_over_bare"] > 0 and row["dropin_over_bare"] > 0 for row in arms.values())
    assert 0 < figures["speed"]["forward_share"] < 1
    assert "except_last" in unet.show(figures)


# Sharing


def test_sharing_measures_both_kinds_of_shares():
    weights = sharing.WeightsSize(steps=4, warm_up=1, layers=2, width=32, samples=32, microbatches=4)
    costs = Costs(0.002, 0.004)
    background = sharing.BackgroundSize(costs=costs, background_costs=Costs(0.001, 0.002), steps=2, rounds=2)
    figures = json.loads(json.dumps(sharing.run(quiet, beside=1, weights=weights, background=background)))
    assert min(figures["weights"]["seconds"]) > 0
    assert figures["weights"]["wanted"] == 3
    found = figures["background"]
    # 4 stages and 4 micro-batches: 7 slots of a forward and a backward, 4 of them busy.
    assert found["alone_seconds"] >= 7 * 0.006 * 0.99
    assert found["idle"] >= 3 / 7 - 0.01
    assert 0 <= found["share"] <= 1
    assert len(found["growths"]) == background.rounds
    shown = sharing.show(figures)
    assert "of the idle time it gets" in shown
    assert shown.startswith("beside 1 other busy processes\n")


def test_what_is_outside_a_span_does_not_count():
    tasks = [sharing.BusyInterval(0, 2), sharing.BusyInterval(3, 5), sharing.BusyInterval(7, 8)]
    assert sharing.within(tasks, 1, 4) == 2
    assert sharing.within(tasks, 5, 7) == 0
    assert sharing.within(tasks, 0, math.inf) == 5
