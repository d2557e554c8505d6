"""The benchmarks: tiny forms run, counted bytes are right, and what is wrong in their options is said."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import threading
import time
from contextlib import closing
from importlib import import_module

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.bench import (
    BENCHMARKS,
    dropin,
    edges,
    embedded,
    examples,
    memory,
    metrics,
    offload,
    overhead,
    pipeline,
    rss,
    sharing,
    slack,
    unet,
)
from asyncpipe.bench import many_steps as many
from asyncpipe.bench.byte_counters import ByteMeter, SavedBytes
from asyncpipe.bench.harness import busy_processes
from asyncpipe.bench.real_tasks import RealTasksSize, stage_seconds
from asyncpipe.bench.unet import memory as unet_memory
from asyncpipe.bench.unet import model as unet_model
from asyncpipe.bench.unet import speed as unet_speed
from asyncpipe.bench.web_app import send_requests
from asyncpipe.cli import main
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.edges.connect import HOST_TRANSPORTS

CPU = resolve_devices(["cpu:0"])[0]
UNET = unet_memory.UNetMemorySize(depth=2, convs=1, channels=8, image=16, samples=8, microbatches=8, searched=(1, 2))


def quiet(_: str) -> None:
    """Nobody wants to see the progress."""


# The command


def test_every_benchmark_runs_and_shows():
    for name in BENCHMARKS:
        module = import_module(f"asyncpipe.bench.{name}")
        assert callable(module.run), name
        assert callable(module.show), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "--device", "cpu"], "the benchmark 'memory' has no --device; it has no options"),
        (["unet", "--size", "huge"], "size must be one of 'small', 'paper', got 'huge'"),
        (["overhead", "--size", "small"], "the benchmark 'overhead' has no --size; it has no options"),
        (
            ["peers", "--cases", "tiny,huge"],
            "case must be one of 'tiny', 'fine', 'mid', 'coarse', 'transformer', got 'huge'",
        ),
        (
            ["peers", "--contestants", "gpipe"],
            "contestant must be one of 'plain', 'bare', 'step', 'dropin', 'torchgpipe'",
        ),
        (["unet", "--device", "tpu"], "'tpu' is no device"),
        (["unet", "--device", "cuda:99"], "'cuda:99' is not there"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_benchmark(capsys, monkeypatch):
    monkeypatch.setattr(unet, "run", lambda progress, **options: {"options": options})
    assert main(["bench", "unet", "--size", "paper", "--device", "cpu:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == {"device": "cpu:1", "size": "paper"}


# dropin


def test_dropin_compares_three_ways_and_finds_both_devices_busy():
    size = dropin.DropinSize(width=64, layers=4, microbatches=4, samples=64, warm_up=1, rounds=2)
    figures = json.loads(json.dumps(dropin.run(quiet, size=size)))
    for mode in ("never", "always"):
        column = figures["checkpoint"][mode]
        for phase in Phase:
            assert 0 <= column[f"{phase}_both_busy_seconds"] < column[f"{phase}_seconds"]
        assert min(column[name] for name in ("engine_seconds", "dropin_seconds", "whole_step_seconds")) > 0
        assert column["speedup"] > 0
        assert column["dropin_over_step"] > 0
    assert len(dropin.show(figures).splitlines()) == 11


@pytest.mark.parametrize("recompute", [False, True])
def test_the_engine_alone_makes_the_same_gradients(recompute):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(4)]
    x, target = torch.randn(2, 12, 8, dtype=torch.float64)
    model = nn.Sequential(*layers)
    loss = dropin.engine_step([model[:2], model[2:]], x, target, 3, recompute=recompute)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=3).sync() as pipe:
        same = nn.functional.mse_loss(pipe(x), target)
        same.backward()
    torch.testing.assert_close(loss, same.detach())
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


def test_all_busy_counts_the_seconds_in_which_every_device_computes():
    # One device is alone with the first micro-batch, the other with the last.
    graph = lower(find_schedule("gpipe"), Shape(2, 4, 2), devices=["cpu:0", "cpu:1"], phase=Phase.FORWARD)
    assert dropin.all_busy(simulate(graph, Costs(forward=1.0))) == 3.0
    alone = lower(find_schedule("gpipe"), Shape(2, 1, 2), devices=["cpu:0", "cpu:1"], phase=Phase.FORWARD)
    assert dropin.all_busy(simulate(alone, Costs(forward=1.0))) == 0.0


# pipeline


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


def test_steps_in_a_row_train_in_both_ways(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    batch = torch.ones(4, 4), torch.zeros(4, 4)
    options = {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    case = many.ManySteps("two layers", 2, lambda: model, lambda count: [batch] * count, lambda: options)
    monkeypatch.setattr(many, "MANY_STEPS", {"small": lambda: case})
    for name, value in {"WIDTH": 8, "SAMPLES": 32, "ROUNDS": 1, "WARM_UP": 0}.items():
        monkeypatch.setattr(pipeline, name, value)
    figures = json.loads(json.dumps(pipeline.run(quiet, steps=4, repeats=2)))
    row = figures["many"]["cases"]["small"]
    for way in ("step", "steps"):
        assert row[way]["seconds"] > 0
        assert 0 <= row[way]["first_idle"] < 1
        assert row[way]["last_border_seconds"] >= 0
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert "4 steps in a row, medians of 2 turns" in pipeline.show(figures)
    with pytest.raises(OptionError, match="case must be one of 'small', got 'tiny'"):
        pipeline.run(quiet, steps=4, cases="small,tiny")


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


# overhead


def test_overhead_measures_tasks_metrics_and_graphs():
    graphs = {"devices": (2, 4), "steps": 2, "warm_up": 1, "graph_stages": 4, "graph_microbatches": (4, 8)}
    real = RealTasksSize(width=8, layers=1, microbatches=4, rows=2, warm_up=0, rounds=2)
    size = overhead.OverheadSize(**graphs, seconds=0.1, rounds=2, period=0.05, real=real)
    figures = json.loads(json.dumps(overhead.run(quiet, size=size)))
    assert [row["devices"] for row in figures["devices"]] == [2, 4]
    assert figures["us_per_task"] == figures["devices"][1]["us_per_task"] > 0
    assert all(0 < row["beyond_plain"] < row["us_per_task"] for row in figures["devices"])
    # F and B of 4 micro-batches on each device, and a copy each way between neighbours.
    assert [row["tasks"] for row in figures["real"]["devices"]] == [24, 56]
    for row in figures["real"]["devices"]:
        assert min(row["step_seconds"], row["busiest_seconds"]) > 0
        assert row["us_per_task_by_cores"] <= row["us_per_task"]
    assert figures["metrics_us_per_task"] == figures["metrics"]["us_per_task"]
    assert figures["metrics"]["tasks"] == 572
    # One before the first slice, and at least one in each slice with metrics.
    assert figures["metrics"]["scrapes"] >= 1 + size.rounds
    shown = overhead.show(figures)
    assert f"scraped {figures['metrics']['scrapes']} times: {figures['metrics_us_per_task']:.2f} µs per task" in shown


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


def test_only_the_slices_with_metrics_are_observed(monkeypatch):
    seen = []

    class Counting(overhead.PipelineCollector):
        def step_completed(self, record):
            seen.append(record.step)
            super().step_completed(record)

    monkeypatch.setattr(overhead, "PipelineCollector", Counting)
    size = overhead.OverheadSize(warm_up=1, seconds=0.05, rounds=1, period=0.02)
    figures = asyncio.run(overhead.metrics_cost(quiet, size))
    assert seen == list(range(len(seen)))
    assert figures["plain_us_per_task"] > 0


# metrics


def test_metrics_are_compared_with_training_without_them():
    size = metrics.TrainingSize(seconds=0.1, rounds=2, period=0.04, warm_up=1, text_bytes=50_000)
    figures = json.loads(json.dumps(metrics.run(quiet, size=size)))
    assert figures["scrapes"] >= size.rounds
    assert len(figures["ratios"]) == size.rounds
    assert figures["tasks"] > 0
    assert min(figures["plain_seconds"], figures["metrics_seconds"], figures["ratio"]) > 0
    assert f"({figures['scrapes']} scrapes)" in metrics.show(figures)


def test_benchmarks_of_examples_say_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setattr(examples.asyncpipe, "__file__", str(tmp_path / "asyncpipe" / "__init__.py"))
    examples.load_example.cache_clear()
    with pytest.raises(OptionError, match="from examples/charlm, and there is no"):
        metrics.run(quiet)
    with pytest.raises(OptionError, match="from examples/unet, and there is no"):
        unet_model.make_model(1, 1, 4)


# memory


def test_what_autograd_saves_shrinks_by_the_number_of_microbatches():
    size = memory.MemorySize(width=16, layers=4, samples=64, microbatches=(2, 8, 32), stages=(1, 2))
    figures = json.loads(json.dumps(memory.run(quiet, size=size)))
    activation = size.samples * size.width * 4
    for row in figures["rows"]:
        m = row["microbatches"]
        # Every layer saves its output, and the first one the input, which is the caller's.
        assert row["never"]["saved_bytes"] == row["never"]["total_bytes"] == size.layers * activation
        if row["stages"] == 1:
            assert row["saved_ratio"] == row["total_ratio"] == m
            assert row["except_last"]["borders_bytes"] == 0
        else:
            # While the stages recompute different micro-batches, their border is there twice: 5 for 4 layers.
            assert size.layers / (size.layers + 1) * m <= row["saved_ratio"] <= m
            assert row["except_last"]["borders_bytes"] == activation
            assert row["total_ratio"] <= row["saved_ratio"]
    assert len(memory.show(figures).splitlines()) == 5 + len(figures["rows"])


def test_resident_memory_is_read_in_a_fresh_process(monkeypatch):
    monkeypatch.setattr(rss, "CASES", ("threads",))
    figures = rss.run(quiet, size=rss.RssSize(width=1024, layers=1, samples=4))
    (row,) = figures["rows"]
    assert figures["stage_bytes"] == 1025 * 1024 * 4
    assert row["controller_peak"] >= row["controller_end"] > row["controller_start"] + 4 * figures["stage_bytes"]
    assert row["workers"] == []
    assert "\nthreads " in rss.show(figures)


def test_saved_bytes_count_a_storage_once_and_only_while_it_waits():
    weight = nn.Parameter(torch.ones(10))
    saved = SavedBytes([weight])
    with saved.watching():
        x = torch.ones(10, requires_grad=True) * 2
        y = (x * weight).exp()
        z = x[:5].exp() + y[:5] * y[5:]
    # x for its product with weight, which is not counted; y once for exp and both halves; exp of x[:5].
    assert saved.live == {"saved": 100, "borders": 0, "total": 100}
    saved.note_input(x)
    saved.note_input(x[3:])
    assert saved.live == {"saved": 100, "borders": 40, "total": 100}
    z.sum().backward()
    assert saved.live == {"saved": 0, "borders": 40, "total": 40}
    del x, y, z
    assert saved.live == {"saved": 0, "borders": 0, "total": 0}
    assert saved.peak == {"saved": 100, "borders": 40, "total": 100}


def test_saved_bytes_keep_nothing_alive():
    saved = SavedBytes()
    with saved.watching():
        y = torch.ones(10, requires_grad=True).exp()  # Saves its own output.
    assert saved.live["saved"] == 40
    del y
    assert saved.live["saved"] == 0


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


def test_the_peak_of_a_bare_model_is_that_of_its_activations():
    def peak(samples: int) -> float:
        size = unet_memory.UNetMemorySize(2, 1, 8, 16, samples, samples, ())
        return unet_memory.counted_peak(size, 1, 8, None, CPU, values=False)

    states = unet_memory.STATE_BYTES * unet_model.parameter_count(2, 1, 8)
    assert peak(64) > states
    assert peak(64) - peak(32) == pytest.approx((peak(128) - peak(64)) / 2, rel=0.01)


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


def test_unet_without_its_search_or_speed_says_so():
    size = unet_memory.UNetMemorySize(depth=1, convs=1, channels=4, image=8, samples=4, microbatches=4, searched=(1,))
    figures = unet.run(quiet, size="paper", memory_size=size)
    assert figures["speed"] is None
    assert [way["way"] for way in figures["memory"]["other_ways"]] == ["step"]
    assert "speed is not measured" in unet.show(figures)


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


def test_the_models_layers_are_those_of_the_papers_authors():
    kinds = [type(layer).__name__ for layer in unet_model.make_model(1, 2, 4)[0]]
    assert kinds == ["Conv2d", "Dropout2d", "InstanceNorm2d", "LeakyReLU"]
    assert unet_model.parameter_count(5, 6, 72) / 1e6 == pytest.approx(362.2, abs=0.1)
    assert unet_model.parameter_count(5, 11, 128) / 1e9 == pytest.approx(2.21, abs=0.01)


# Slack


def test_slack_is_worth_what_the_reference_says():
    """Simulated makespans of 1F1B and eager 1F1B in units of a forward; the real steps once, and quick."""
    size = slack.SlackSize(rounds=1, unit=1e-4)
    figures = slack.run(quiet, size=size)
    simulated = figures["simulated"]
    for scenario, lazy, eager in (("uniform", 57, 57), ("jitter", 65.9, 59.2), ("copies", 85, 63)):
        assert simulated[scenario]["1f1b"] == pytest.approx(lazy, rel=0.015)
        assert simulated[scenario]["eager-1f1b"] == pytest.approx(eager, rel=0.015)
    for scenario, row in figures["measured"].items():
        busiest = 48 * size.unit * (0.2 if scenario == "lengths" else 0.6)
        assert all(seconds > busiest for seconds in row.values()), scenario
    shown = slack.show(figures)
    assert "copies as long as a forward" in shown
    assert "1.35×" in shown


# Embedded


def test_a_service_is_measured_inside_an_application():
    small = {"width": 16, "blocks": 2, "heads": 2, "context": 16, "max_bytes": 50_000}
    size = embedded.EmbeddedSize(50, seconds=0.4, rounds=2, blocked=1, blocked_seconds=0.3, warm_up=2, parameters=small)
    figures = json.loads(json.dumps(embedded.run(quiet, size=size)))
    training = figures["requests"]["training"]
    assert training["answered"] >= size.rounds * 20
    assert training["answered"] % 20 == 0, "turns are repeated as a whole"
    assert training["failed"] == figures["requests"]["idle"]["failed"] == 0
    assert 0 < training["p50"] <= training["p99"] <= training["max"]
    assert figures["requests"]["apart"]["answered"] >= size.rounds * 20
    assert figures["requests"]["apart"]["failed"] == 0
    assert all(len(figures["steps"][kind]["ratios"]) == size.rounds for kind in ("without", "with", "apart"))
    assert set(figures["blocked"]["own"]) == {"sleeps", "computes"}
    # Where training has the handler's loop, no step can end while that is blocked.
    assert figures["blocked"]["running"]["sleeps"]["during"] == 0
    shown = embedded.show(figures)
    assert 'it sleeps, loop="running"' in shown
    assert "  answered by a process" in shown


def test_requests_that_wait_behind_a_slow_one_are_slow_as_well():
    """The latency counts from when a request was due: a server that stands still is not seen as one slow request."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=_serve_one_by_one, args=(server, 10, 0.3), daemon=True).start()
        found = send_requests(server.getsockname()[1], 100, 0.5)
    assert len(found["latencies"]) + found["failed"] == 50
    assert found["failed"] == 0
    assert len(found["late"]) == 50
    # Due in the first fifth of a second of those 0.3.
    assert sum(latency > 0.1 for latency in found["latencies"]) >= 20


def test_requests_that_fail_are_counted():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        answer = b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno"
        threading.Thread(target=_serve_one_by_one, args=(server, 10, 0.0, answer), daemon=True).start()
        found = send_requests(server.getsockname()[1], 100, 0.1)
    assert found["failed"] == 10
    assert found["latencies"] == []


def _serve_one_by_one(server, slow, seconds, answer=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"):
    """Answers on one thread, and sleeps before the ``slow``th answer; ends when ``server`` is closed."""
    import selectors

    answered = 0
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while server.fileno() != -1:
            for key, _ in selector.select(0.1):
                if key.fileobj is server:
                    selector.register(server.accept()[0], selectors.EVENT_READ)
                elif key.fileobj.recv(65536):
                    answered += 1
                    if answered == slow:
                        time.sleep(seconds)
                    key.fileobj.sendall(answer)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()


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


def test_busy_processes_compute_and_end(monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with busy_processes(2):
        assert [process.poll() for process in started] == [None, None]
        # As if this process had ended in whatever way.
        started[0].stdin.close()
        started[0].wait(30)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_what_is_outside_a_span_does_not_count():
    tasks = [sharing.BusyInterval(0, 2), sharing.BusyInterval(3, 5), sharing.BusyInterval(7, 8)]
    assert sharing.within(tasks, 1, 4) == 2
    assert sharing.within(tasks, 5, 7) == 0
    assert sharing.within(tasks, 0, math.inf) == 5


# offload


def test_offload_trains_in_what_is_too_little_to_keep_everything():
    size = offload.OffloadSize(width=128, layers=6, samples=1024, rounds=1)
    figures = json.loads(json.dumps(offload.run(quiet, size=size)))
    kept, offloaded, recomputed = figures["rows"]
    assert [row["fits"] for row in figures["rows"]] == [False, True, True]
    assert all(row["same_bits"] for row in figures["rows"])
    assert max(offloaded["bytes"], recomputed["bytes"]) < figures["limit_bytes"] < kept["bytes"]
    assert kept["predicted_bytes"] == pytest.approx(kept["bytes"], rel=0.1)
    assert "out of memory" in offload.show(figures)
