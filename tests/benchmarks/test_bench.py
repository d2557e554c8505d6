"""The benchmarks: tiny forms run, counted bytes are right, and what is wrong in their options is said."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

from asyncpipe.bench import BENCHMARKS, overhead, pipeline
from asyncpipe.bench.cases import Case, mlp
from asyncpipe.bench.harness import markdown
from asyncpipe.cli import main
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import simulate_steps
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.edges.connect import HOST_TRANSPORTS
from benchmarks import BENCHMARKS as OURS
from benchmarks import edges, examples, graphs, metrics, plan, reductions, sharing, unet
from benchmarks import many_steps as many
from benchmarks.__main__ import main as ours
from benchmarks.byte_counters import ByteMeter
from benchmarks.unet import memory as unet_memory
from benchmarks.unet import speed as unet_speed

CPU = resolve_devices(["cpu:0"])[0]
UNET = unet_memory.UNetMemorySize(depth=2, convs=1, channels=8, image=16, samples=8, microbatches=8, searched=(1, 2))


def quiet(_: str) -> None:
    """Nobody wants to see the progress."""


def measured(benchmark, **options):
    """What a benchmark finds, as JSON has it, and its Markdown."""
    figures = json.loads(json.dumps(benchmark.run(quiet, **options)))
    return figures, benchmark.show(figures)


def small(devices: int) -> Case:
    return Case("small", devices, 4, (2, 8), partial(mlp, 8, 1))


# The commands


@pytest.mark.parametrize(
    ("package", "names", "command"), [("asyncpipe.bench", BENCHMARKS, main), ("benchmarks", OURS, ours)]
)
def test_every_benchmark_has_run_and_show_and_is_in_the_help(package, names, command, capsys):
    for name in names:
        module = import_module(f"{package}.{name}")
        assert callable(module.run), name
        assert callable(module.show), name
    with pytest.raises(SystemExit, match="0"):
        command(["bench", "--help"] if command is main else ["--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\b", shown, re.MULTILINE) for name in names)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (ours, ["unet", "--size", "huge"], "size must be one of 'small', 'paper', got 'huge'"),
        (ours, ["metrics", "--size", "small"], "unrecognized arguments: --size small"),
        (ours, ["unet", "--device", "tpu"], "'tpu' is no device"),
        (ours, ["unet", "--device", "cuda:99"], "'cuda:99' is not there"),
        (ours, ["many_steps", "--steps", "0"], "argument --steps: must be an integer of at least 1, got '0'"),
        (ours, ["many_steps", "--cases", "fine,huge"], "one of 'fine', 'broad', 'broad-zb-h2', 'charlm', got 'huge'"),
        (ours, ["paper", "--device", "cpu"], "--device must be a GPU, on which the paper's lines of one GPU are measu"),
        (ours, ["paper", "--out", __file__], "--out must be a folder that can be made, got"),
        (ours, ["paper", "--size", "small"], "unrecognized arguments: --size small"),
        (main, ["bench", "pipeline", "--repeats", "3"], "unrecognized arguments: --repeats 3"),
        (ours, ["peers", "--cases", "tiny,huge"], "case must be one of 'tiny', 'fine', 'mid', 'coarse', 'br"),
        (ours, ["peers", "--contestants", "gpipe"], "contestant must be one of 'plain', 'bare', 'step', 'dis"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(capsys, command, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(command(arguments))
    assert message in capsys.readouterr().err


def test_options_reach_the_benchmark(capsys, monkeypatch):
    monkeypatch.setattr(unet, "run", lambda progress, **options: {"options": options})
    assert ours(["unet", "--size", "paper", "--device", "cpu:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == {"device": "cpu:1", "size": "paper"}


def test_benchmarks_of_examples_say_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "benchmarks" / "examples.py"))
    examples.load_example.cache_clear()
    with pytest.raises(OptionError, match="from examples/charlm, and there is no"):
        metrics.run(quiet)


def test_figures_are_markdown_and_their_names_say_the_units():
    rows = [{"case": "a|b", "step_seconds": 0.0123, "us_a_task": 1.5}, {"case": "c", "idle_share": 0.25, "ratio": 2.0}]
    assert markdown(rows="{rounds} rounds:")({"rounds": 3, "rows": rows}).splitlines() == [
        "3 rounds:",
        "",
        "| case |    step | µs a task |  idle | ratio |",
        "| ---- | ------: | --------: | ----: | ----: |",
        "| a\\|b | 12.3 ms |      1.50 |     – |     – |",
        "| c    |       – |         – | 25.0% | 2.000 |",
    ]


# The benchmarks of the package


def test_a_pipeline_is_compared_with_its_bound():
    figures, shown = measured(pipeline, case=small(2))
    assert figures["medians"]["over_bound"] > 1
    assert figures["bubble"] == 1.25
    assert "speed up" in shown


def test_overhead_measures_empty_and_real_tasks():
    size = overhead.OverheadSize(devices=(2, 4), steps=2, warm_up=1, rounds=2, case=small)
    figures, shown = measured(overhead, size=size)
    assert [row["devices"] for row in figures["empty"]] == [2, 4]
    assert all(row["us_a_task"] > 0 for row in figures["empty"])
    # F and B of 4 micro-batches on each device, and a copy each way between neighbours.
    assert [row["tasks"] for row in figures["real"]] == [24, 56]
    assert all(row["us_a_task_by_the_cores"] <= row["us_a_task"] for row in figures["real"])
    assert "µs a task" in shown


# The benchmarks beside it


def test_the_planner_predicts_what_it_measures():
    choices = (
        plan.PredictedPipeline("gpipe", (1, 2), 2),
        plan.PredictedPipeline("1f1b", (2, 1), 2, "always"),
        plan.PredictedPipeline("zb-h1", (1, 2), 2),
        plan.PredictedPipeline("gpipe", (3,), 1, replicas=2, shard_optimizer=True),
    )
    variants = [[str(each.name) for each in plan.step_variants(choice)] for choice in choices]
    assert variants == [["KEPT"], ["KEPT", "RECOMPUTED"], ["KEPT", "SPLIT"], ["KEPT"]]
    figures, shown = measured(plan, size=plan.PlanSize(widths=(8, 8, 8, 8), samples=8, rounds=1, choices=choices))
    assert [row["schedule"] for row in figures["rows"]] == ["gpipe", "1f1b", "zb-h1", "gpipe"]
    assert 0 <= figures["in_order"] <= figures["pairs"] <= 6
    for row in figures["rows"]:
        assert row["ratio"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"])
    assert len(shown.splitlines()) == 2 + 2 + 4


def test_reductions_are_hidden_where_devices_have_something_to_compute():
    options = {"replicas": 2, "devices": 2, "microbatches": 4, "bucket": 500 << 20}
    figures, shown = measured(reductions, schedules=("1f1b", "interleaved", "zbv"), **options)
    rows = {row["schedule"]: row for row in figures["rows"] if row["gradients"] == "float32"}
    for row in rows.values():
        times = [row[f"{arm}_seconds"] for arm in ("alone", "tasks", "device", "step")]
        assert times == sorted(times)
    # With one stage a device, tasks begin no earlier than a device that waits for its own end.
    assert rows["1f1b"]["within_tasks_share"] == pytest.approx(rows["1f1b"]["within_device_share"], abs=0.02)
    assert rows["1f1b"]["hidden_tasks_share"] == pytest.approx(0.0, abs=0.02)
    for name in ("interleaved", "zbv"):
        assert rows[name]["hidden_tasks_share"] > rows[name]["hidden_device_share"] + 0.1
    assert "| interleaved |" in shown


def test_sharing_measures_both_kinds_of_shares():
    costs = {"costs": Costs(0.002, 0.004), "background_costs": Costs(0.001, 0.002)}
    size = sharing.SharingSize(width=32, weighted_steps=4, warm_up=1, steps=2, rounds=2, **costs)
    figures, shown = measured(sharing, size=size)
    assert min(figures["weights"]["device_seconds"]) > 0
    assert figures["weights"]["by_the_weights"] == 3
    found = figures["background"]
    # 4 stages and 4 micro-batches: 7 slots of a forward and a backward, 4 of them busy.
    assert found["alone_seconds"] >= 7 * 0.006 * 0.99
    assert found["idle_share"] >= 3 / 7 - 0.01
    assert 0 <= found["background_share"] <= 1
    assert "A background job beside 1F1B" in shown


def test_only_compute_within_the_span_counts():
    class Time:
        def __init__(self, start, end, queue=Queue.COMPUTE):
            self.start, self.end, self.task = start, end, Task(0, TaskKind.FORWARD, 0, 0, Lane("cpu:0", queue), 0)

    class Step:
        origin, tasks = 10.0, [Time(0, 2), Time(3, 5), Time(7, 8), Time(0, 9, Queue.COPY_IN)]

    assert sharing.compute_within([Step], 11, 14) == 2
    assert sharing.compute_within([Step], 15, 17) == 0
    assert sharing.compute_within([Step], 10, 99) == 5


def test_large_graphs_are_lowered_and_simulated():
    figures, _ = measured(graphs, stages=4, microbatches=(4, 8))
    assert [row["microbatches"] for row in figures["graphs"]] == [4, 8]
    assert all(row["us_a_lowered_task"] > 0 < row["us_a_simulated_task"] for row in figures["graphs"])


def test_steps_in_a_row_train_in_all_ways(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    batch = torch.ones(4, 4), torch.zeros(4, 4)
    options = {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    case = many.ManySteps("two layers", 2, lambda: model, lambda count: [batch] * count, lambda: options)
    monkeypatch.setattr(many, "MANY_STEPS", {"small": lambda: case})
    figures, shown = measured(many, steps=4, repeats=2)
    assert [row["case"] for row in figures["rows"]] == ["small, step", "small, steps", "small, steps, clipped"]
    assert all(row["step_seconds"] > 0 and 0 <= row["first_idle_share"] < 1 for row in figures["rows"])
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert "4 steps in a row, medians of 2 turns" in shown


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


def test_edges_measures_each_way_to_send_by_size():
    size = edges.EdgesSize(bytes=(1 << 10, 1 << 20), rounds=2, warm_up=0, messages_at_most=3)
    figures, shown = measured(edges, size=size)
    assert figures["arms"] == [edges.BARE, "shared_memory, taken", *HOST_TRANSPORTS]
    assert list(figures["us_a_message"]) == ["1 KiB", "1 MiB"]
    for ways in figures["us_a_message"].values():
        assert list(ways) == ["to and fro", "one way"]
        assert all(list(arms) == figures["arms"] and min(arms.values()) > 0 for arms in ways.values())
    assert len(shown.splitlines()) == 2 * 4 + 1


def test_metrics_are_compared_with_training_without_them():
    size = metrics.TrainingSize(seconds=0.1, rounds=2, period=0.04, warm_up=1, text_bytes=50_000)
    figures, shown = measured(metrics, size=size)
    assert figures["scrapes"] >= size.rounds
    assert len(figures["ratios"]) == size.rounds
    assert (
        min(figures["tasks"], *(figures["medians"][each] for each in ("plain_seconds", "metrics_seconds", "ratio"))) > 0
    )
    assert f"({figures['scrapes']} scrapes)" in shown


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
    # One stage in 1F1B holds one micro-batch at a time, recomputed or not, by `step` and by the drop-in call.
    for other in figures["other_ways"]:
        assert other["peak_bytes"] == pytest.approx(best["peak_bytes"], rel=0.05)
    assert "The largest one, trained in other ways" in unet_memory.show(figures)


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
    assert search(lambda c: 1e9, limit=100_000)[0] == (0, 0.0)


def test_unet_measures_every_arm_against_the_bare_model():
    speed = unet_speed.UNetSpeedSize(depth=1, convs=1, channels=4, image=8, samples=2, warm_up=0, rounds=2)
    memory_size = unet_memory.UNetMemorySize(
        depth=1, convs=1, channels=4, image=8, samples=4, microbatches=4, searched=(1,)
    )
    figures, shown = measured(unet, speed_size=speed, memory_size=memory_size)
    arms = {row["checkpoint"]: row for row in figures["speed"]["arms"]}
    assert [round(arms[mode]["bound"], 3) for mode in ("never", "except_last", "always")] == [1.0, 0.857, 0.75]
    assert all(row["step_over_bare"] > 0 and row["dropin_over_bare"] > 0 for row in arms.values())
    assert 0 < figures["speed"]["forward_share"] < 1
    assert "except_last" in shown
