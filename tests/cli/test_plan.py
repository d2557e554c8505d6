"""``asyncpipe profile``, ``asyncpipe plan`` and ``schedule = "auto"``: a tiny model is measured and planned."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import chain
from resume_helpers import make_job as make_run
from torch import Tensor, nn

from asyncpipe import Arguments, DevicePool, Pipeline, Share
from asyncpipe.cli import main
from asyncpipe.cli.prediction_files import read_profile
from asyncpipe.errors import JobFileError, MicrobatchError, PlanError, TaskError
from asyncpipe.ops.model.skips import pop, skippable, stash
from asyncpipe.ops.model.trace.trace import trace
from asyncpipe.pipeline import profiling
from asyncpipe.pipeline.profiling import SampleBatch, choose, measure
from asyncpipe.train.job_file import Job, load_job
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

JOB = """\
name = "tiny"

[job]
entry = "tiny_planned:build"

[pipeline]
devices = ["cpu:0", "cpu:1"]
schedule = "auto"
microbatches = 4

[training]
steps = 2
batch_size = 8
learning_rate = 1e-2
"""

OVERLAP = "overlap = true\n\n[faults]\nstep_retries = 0\n"

PIPELINE = re.compile(r"\[pipeline\]\n(.+\n)+\n")

MODULE = """\
import torch
from torch import nn
from asyncpipe.train.workload import Workload
from profiles import chain

def build():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def batches(batch_size, generator):
        while True:
            x = torch.randn(batch_size, 6, generator=generator)
            yield x, x[:, :3]

    return Workload(model, nn.functional.mse_loss, batches)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job of five small layers, in a folder of its own, which is the working directory."""
    (tmp_path / "tiny_planned.py").write_text(MODULE, encoding="utf-8")
    path = tmp_path / "tiny.toml"
    path.write_text(JOB, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_planned", raising=False)
    yield path
    sys.modules.pop("tiny_planned", None)


@pytest.fixture
def profile(job: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What ``asyncpipe profile`` writes of it."""
    path = job.parent / "profile.json"
    assert main(["profile", str(job), "--microbatches", "2,4", "--steps", "1", "--output", str(path)]) == 0
    shown = capsys.readouterr()
    assert "2 micro-batches, each in ms and KiB" in shown.out
    assert "0 Linear" in shown.out
    assert shown.err.startswith("… measuring 2 micro-batches, round 1 of 2\n")
    return path


HOSTS = """
[link]
latency = 1e-4
bandwidth = 1e9

[[hosts]]
name = "left"
devices = ["cpu:0", "cpu:1"]
speeds = [1.0, 0.25]

[[hosts]]
name = "right"
devices = ["cpu:0"]
"""


# The commands


@pytest.mark.usefixtures("no_leaks")
def test_a_profile_has_every_layer_for_every_number(profile):
    found = read_profile(profile)
    assert [layer.name for layer in found.layers] == ["0 Linear", "1 Tanh", "2 Linear", "3 Tanh", "4 Linear"]
    assert [layer.parameters for layer in found.layers] == [4 * 8 * 7, 0, 4 * 8 * 9, 0, 4 * 3 * 9]
    assert [layer.inner for layer in found.layers] == [False, True, True, True, True]
    assert found.links == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert found.measured == [2, 4]
    assert found.devices == ("cpu:0", "cpu:1")
    # Micro-batches of two samples: the first layer keeps its input, Tanh its output, the loss what it is given.
    sizes = found.measurement(4).layers
    assert [layer.saved for layer in sizes] == [0, 64, 0, 64, 24]
    for number, size in ((4, 64), (2, 128)):
        wanted = chain(size * 3 // 4, *[size] * 4, 0, saved_by={0: (0,), 2: (1, 2), 4: (3, 4)})
        assert found.measurement(number).sent == wanted
    costs = found.costs([2, 3], 4)
    assert all(second > 0 for row in costs.seconds.values() for second in row[1:])


def told(out: str) -> list[str]:
    """The lines of a plan without the signs of comments."""
    return [line.removeprefix("#").removeprefix(" ") for line in out.splitlines()]


@pytest.mark.promise(
    "Right results", "`asyncpipe train` takes what `asyncpipe plan` prints, for sequences and for traced models."
)
def test_the_best_plans_are_shown_with_what_to_write(job, profile, capsys):
    assert main(["plan", str(job), "--profile", str(profile), "--checkpoint", "never,always"]) == 0
    lines = told(capsys.readouterr().out)
    assert lines[0].split()[:5] == ["replicas", "schedule", "balance", "micro-batches", "checkpoint"]
    rows = lines[1 : lines.index("")]
    assert len(rows) == 10
    assert all("ms" in row and "%" in row and "B" in row for row in rows)
    # The lines that it ends with are those of the first plan, and a job with them has it.
    chosen = "\n".join(lines[lines.index("[pipeline]") :])
    table = tomllib.loads(chosen)["pipeline"]
    first = [str(table.get("replicas", 1)), table["schedule"], "-".join(map(str, table["balance"]))]
    assert rows[0].split()[:3] == first
    job.write_text(PIPELINE.sub(chosen + "\n\n", JOB), encoding="utf-8")
    assert load_job(job).pipeline.balance == tuple(table["balance"])
    assert main(["train", str(job), "--no-progress"]) == 0


@pytest.mark.promise(
    "Right results", "`asyncpipe train` takes what `asyncpipe plan` prints, for sequences and for traced models."
)
def test_a_plan_that_was_printed_is_what_train_takes(job, profile, capsys):
    text = JOB.replace('schedule = "auto"', 'schedule = "gpipe"\nstages = 4\ntransport = "connection"')
    job.write_text(text, encoding="utf-8")
    assert main(["plan", str(job), "--profile", str(profile), "--schedules", "interleaved,zb-h1"]) == 0
    printed = job.parent / "plan.toml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    table = tomllib.loads(printed.read_text(encoding="utf-8"))["pipeline"]
    planned = load_job(job, plan=printed).pipeline
    assert (planned.schedule, list(planned.balance)) == (table["schedule"], table["balance"])
    assert (planned.stages, planned.transport) == (None, "connection")
    assert main(["train", str(job), "--plan", str(printed), "--no-progress"]) == 0
    printed.write_text(f"{printed.read_text(encoding='utf-8')}offload = [0.5, 0.0]\n", encoding="utf-8")
    assert load_job(job, plan=printed).pipeline.offload == (0.5, 0.0)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("[training]\nsteps = 3\n", "plan.toml: is no plan: it must have a table [pipeline] and nothing else"),
        ("pipeline = 3\n", "plan.toml: is no plan"),
        ("[pipeline]\nbalanse = [1]\n", "plan.toml: pipeline.balanse: unknown key; did you mean 'balance'?"),
        ('[pipeline]\ndevices = ["cpu"]\nworkers = "ray"\n', "pipeline.workers: gradients stay in the workers"),
        ("[pipeline]\nbalance = [9, 9]\n", "pipeline: balance [9, 9] sums up to 18, but the model has 5 layers"),
    ],
)
def test_a_plan_that_does_not_fit_the_job_is_refused_in_a_line(job, capsys, plan, message):
    job.write_text(JOB.replace('"auto"', '"1f1b"'), encoding="utf-8")
    (job.parent / "plan.toml").write_text(plan, encoding="utf-8")
    assert main(["train", "tiny.toml", "--plan", "plan.toml", "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


TRACED = MODULE.replace("return Workload(model,", "return Workload(trace(model, Arguments.of(torch.randn(2, 6)), 4),")


@pytest.mark.promise(
    "Right results", "`asyncpipe train` takes what `asyncpipe plan` prints, for sequences and for traced models."
)
def test_a_traced_job_is_planned_and_trains_with_what_is_printed(job, capsys):
    (job.parent / "tiny_planned.py").write_text(f"from asyncpipe import Arguments, trace\n{TRACED}", encoding="utf-8")
    job.write_text(JOB.replace("microbatches", "balance = [1, 3]\nmicrobatches"), encoding="utf-8")
    options = ["--microbatches", "4", "--steps", "1", "--schedules", "1f1b,interleaved,zb-h1", "--replicas", "1"]
    # One mode of recomputation, so that the ten plans that are shown are all.
    assert main(["plan", str(job), *options, "--checkpoint", "never"]) == 0
    lines = told(capsys.readouterr().out)
    rows = lines[1 : lines.index("")]
    assert {row.split()[2] for row in rows} <= {"1-3", "2-2", "3-1", "1-1-1-1"}
    assert {row.split()[1] for row in rows} == {"1f1b", "interleaved", "zb-h1"}
    balances = ['schedule = "1f1b"\nbalance = [1, 3]', "\n".join(lines[lines.index("[pipeline]") + 2 :])]
    for balance in balances:
        table = f'[pipeline]\ndevices = ["cpu:0", "cpu:1"]\n{balance}\n\n'
        job.write_text(PIPELINE.sub(table, JOB), encoding="utf-8")
        assert main(["train", str(job), "--no-progress"]) == 0
    job.write_text(JOB, encoding="utf-8")
    assert main(["train", str(job), "--no-progress"]) == 0, "the schedule is chosen by measurement"


def test_json_has_the_same_plans(job, profile, capsys):
    options = ["--profile", str(profile), "--schedules", "gpipe,1f1b", "--microbatches", "4", "--json"]
    assert main(["plan", str(job), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job"], found["devices"]) == ("tiny", ["cpu:0", "cpu:1"])
    assert {each["schedule"] for each in found["plans"]} == {"gpipe", "1f1b"}
    assert {each["microbatches"] * each.get("replicas", 1) for each in found["plans"]} == {4}
    assert {each.get("replicas", 1) for each in found["plans"]} == {1, 2}
    seconds = [each["seconds"] for each in found["plans"]]
    assert seconds == sorted(seconds)
    assert all(len(each["memory"]) == 2 and 0 <= each["bubble"] < 1 for each in found["plans"])


def make_even(profile: Path) -> None:
    """Let every layer take the same time, and nothing depend on what was measured."""
    table = json.loads(profile.read_text(encoding="utf-8"))
    for measurement in table["measurements"].values():
        measurement["overhead"] = dict.fromkeys(measurement["overhead"], 0.0)
        measurement["step"] = measurement["latency"] = 1e-4
        for layer in measurement["layers"]:
            for kind in ("forward", "light_forward", "recompute", "backward", "input_gradient", "weight_gradient"):
                layer[kind] = 1e-3
    profile.write_text(json.dumps(table), encoding="utf-8")


def test_where_a_job_overlaps_its_steps_what_counts_is_how_soon_one_follows_the_other(job, profile, capsys):
    make_even(profile)
    options = [
        "--profile",
        str(profile),
        "--schedules",
        "zb-h1",  # With 1f1b the first device is also the last one at work.
        "--microbatches",
        "4",
        "--checkpoint",
        "never",
        "--replicas",
        "1",
        "--json",
    ]
    found = []
    for text in (JOB, JOB + OVERLAP):
        job.write_text(text, encoding="utf-8")
        assert main(["plan", str(job), *options]) == 0
        found.append(json.loads(capsys.readouterr().out)["plans"][0])
    alone, overlapping = found
    assert overlapping["bubble"] < alone["bubble"]
    assert overlapping["seconds"] < alone["seconds"]


def test_a_plan_with_replicas_is_what_train_takes(job, profile, capsys):
    """In a job whose optimizer is in the step they may have shards; a plan without replicas says so."""
    job.write_text(JOB.replace("microbatches = 4", "microbatches = 2\nreplicas = 2") + OVERLAP, encoding="utf-8")
    printed = job.parent / "plan.toml"
    for rows, shards in (("2", True), ("1", False)):
        assert main(["plan", str(job), "--schedules", "gpipe", "--replicas", rows, "--steps", "1"]) == 0
        printed.write_text(capsys.readouterr().out, encoding="utf-8")
        planned = load_job(job, plan=printed).pipeline
        assert (planned.replicas, planned.shard_optimizer) == (int(rows), shards)
        assert planned.microbatches * planned.replicas in (2, 4, 8)
        assert main(["train", str(job), "--plan", str(printed), "--no-progress"]) == 0
        capsys.readouterr()


def test_a_memory_limit_leaves_out_what_does_not_fit(job, profile, capsys):
    base = ["plan", str(job), "--profile", str(profile), "--json"]
    assert main(base) == 0
    free = json.loads(capsys.readouterr().out)["plans"]
    limit = min(max(each["memory"]) for each in free)
    assert main([*base, "--memory-limit", str(limit)]) == 0
    assert all(max(each["memory"]) <= limit for each in json.loads(capsys.readouterr().out)["plans"])
    assert main([*base, "--memory-limit", "0.1KiB"]) == 2
    assert "nothing fits into 102 bytes a device; the smallest that was found needs " in capsys.readouterr().err


def test_without_a_profile_the_model_is_measured(job, capsys):
    options = ["--steps", "1", "--microbatches", "2", "--schedules", "1f1b", "--replicas", "2", "--json"]
    assert main(["plan", str(job), *options]) == 0
    shown = capsys.readouterr()
    assert {each["microbatches"] for each in json.loads(shown.out)["plans"]} == {1}
    assert "… measuring 2 micro-batches, round 1 of 2" in shown.err
    assert "… simulating 1f1b" in shown.err


def test_numbers_are_the_jobs_half_and_twice_unless_told(job, capsys):
    assert main(["profile", str(job), "--steps", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [*document["measurements"]] == ["2", "4", "8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "tiny.toml", "--memory-limit", "lots"], "must be a number of bytes, as 8GiB, 500MB or 1000000"),
        (
            ["plan", "tiny.toml", "--checkpoint", "some"],
            "checkpoint must be one of 'always', 'except_last', 'selective', 'never'",
        ),
        (["profile", "tiny.toml", "--microbatches", "4,0"], "must be an integer of at least 1, got '0'"),
        (["profile", "tiny.toml", "--steps", "x"], "must be an integer of at least 1, got 'x'"),
    ],
)
def test_a_wrong_option_is_refused(job, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "tiny.toml", "--microbatches", "9"], "makes 8 micro-batches, not 9; give one with at least"),
        (["plan", "tiny.toml", "--profile", "nothing.json"], "nothing.json: cannot be read: No such file"),
        (["plan", "tiny.toml", "--profile", "profile.json", "--schedules", "zigzag"], "unknown schedule 'zigzag'"),
        (["plan", "tiny.toml", "--profile", "profile.json", "--microbatches", "8"], "the profile knows 2, 4;"),
        (["profile", "tiny.toml", "--microbatches", "2", "--steps", "1", "--output", "no/where"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(profile, capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.usefixtures("no_leaks")
def test_ctrl_c_ends_a_measurement(job, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling.Measuring, "round", interrupted)
    assert main(["profile", str(job)]) == 130


# schedule = "auto"


def test_a_job_without_a_schedule_gets_the_best_one(job, capsys):
    assert main(["train", str(job)]) == 0
    shown = capsys.readouterr().out
    assert "measuring, to choose a schedule" in shown
    assert "4 micro-batches, checkpoint except_last; predicted " in shown
    assert "tiny: 2 steps in " in shown


@pytest.mark.parametrize("share", [None, Share("mine")], ids=str)
async def test_a_run_that_overlaps_its_steps_chooses_for_that(monkeypatch, share):
    asked = []
    plan = profiling.plan
    monkeypatch.setattr(profiling, "plan", lambda *a, **k: asked.append(k["ahead"]) or plan(*a, **k))
    training = {"steps": 3, "clip": None, "overlap": True}
    job = make_run(pipeline={"schedule": "auto"}, training=training, faults={"step_retries": 0})
    async with DevicePool() as pool:
        assert (await TrainingRun(job, make_workload, pool=pool, orders=RunOrders(share)).run()).steps == 3
    assert asked == [1]


def make_job(**pipeline: Any) -> Job:
    return make_run(pipeline={"schedule": "auto", **pipeline}, training={"steps": 3})


def make_workload() -> Workload:
    def batches(batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.randn(batch_size, 6, generator=generator, dtype=torch.float64)
            yield x, x[:, :3]

    return Workload(small_model(), nn.functional.mse_loss, batches)


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.usefixtures("no_leaks")
async def test_choosing_changes_nothing_of_what_is_learned():
    chosen = await TrainingRun(make_job(), make_workload).run()
    given = await TrainingRun(make_job(schedule="1f1b"), make_workload).run()
    assert chosen.loss == pytest.approx(given.loss, rel=1e-12)
    assert chosen.steps == 3


async def test_a_balance_that_is_given_stays():
    run = TrainingRun(make_job(balance=[4, 1]), make_workload)
    await run.run()
    assert run.job.pipeline.balance == (4, 1)
    assert run.job.pipeline.schedule != "auto"


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"balance": [4, 2]}, "pipeline: balance .* sums up to 6"),
        ({"microbatches": 9}, "pipeline: the sample makes 8 micro-batches, not 9"),
    ],
)
async def test_what_auto_cannot_do_is_told(pipeline, message):
    with pytest.raises(JobFileError, match=message):
        await TrainingRun(make_job(**pipeline), make_workload).run()


@pytest.mark.usefixtures("no_leaks")
async def test_a_run_that_is_stopped_while_it_measures_ends(monkeypatch):
    run = TrainingRun(make_job(), make_workload)
    real = profiling.Measuring.round

    def stop_after_the_first(self: profiling.Measuring, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        run.orders.stop()

    monkeypatch.setattr(profiling.Measuring, "round", stop_after_the_first)
    summary = await run.run()
    assert (summary.stopped, summary.steps) == (True, 0)


@pytest.mark.parametrize("schedule", ["auto", "csv:steps.csv", "plugin.module:Class", "1f1b"])
def test_job_files_may_name_schedules_that_are_not_listed(schedule):
    assert make_job(schedule=schedule).pipeline.schedule == schedule


async def test_an_order_may_be_a_hint():
    assert (await TrainingRun(make_job(schedule="1f1b", order="hint"), make_workload).run()).steps == 3
    with pytest.raises(JobFileError, match="only an ordered schedule can be a hint"):
        await TrainingRun(make_job(schedule="backward-first", order="hint"), make_workload).run()


# measure and choose


def sample_of(size: int = 8) -> SampleBatch:
    x = torch.randn(size, 6, dtype=torch.float64)
    return SampleBatch(x, x[:, :3], nn.functional.mse_loss)


def test_measuring_leaves_the_model_and_the_generators_alone():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double().eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sample = sample_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    with torch.no_grad():
        profile = measure(model, ["cpu:0", "cpu:1"], sample, [2], steps=1)
    # Training was measured nevertheless.
    assert profile.measurement(2).sent[0].saved_by == (0,)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not model.training
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@skippable(stash=["wide"])
class Stash(nn.Module):
    def forward(self, x: Tensor):
        yield stash("wide", x)
        return x[:, :6]


@skippable(pop=["wide"])
class Pop(nn.Module):
    def forward(self, x: Tensor):
        skip = yield pop("wide")
        return x + skip[:, :6]


def test_skips_are_links_and_bytes_of_the_layers_at_their_ends():
    model = nn.Sequential(nn.Linear(6, 6), Stash(), nn.Linear(6, 6), Pop(), nn.Linear(6, 3)).double()
    profile = measure(model, ["cpu:0", "cpu:1"], sample_of(), [2], steps=1)
    assert profile.links == ((0, 1), (1, 2), (1, 3), (2, 3), (3, 4))
    assert profile.wiring([2, 1, 2]).links == ((0, 1), (0, 2), (1, 2))
    assert sum(each.size for each in profile.measurement(2).sent if 3 in each.users) == 2 * 4 * 6 * 8


def test_one_layer_on_one_device_can_be_measured():
    profile = measure([nn.Linear(6, 3).double()], ["cpu"], sample_of(), [1, 2], steps=1)
    assert profile.measured == [1, 2]
    assert profile.costs([1], 2).seconds


def test_a_chosen_plan_runs():
    model = small_model()
    sample = sample_of()
    found = choose(model, ["cpu:0", "cpu:1"], sample, 4, checkpoints=["never"], steps=1)
    options = {"loss_fn": sample.loss_fn, **found.options()}
    with Pipeline(model, ["cpu:0", "cpu:1"], **options).sync() as pipe:
        assert len(pipe.stages) == len(found.balance)
        assert pipe.step(sample.x, sample.target).loss is not None


def test_a_traced_model_keeps_its_stages():
    model = nn.Sequential(small_model(), nn.Linear(3, 3).double())
    staged = trace(model, Arguments.of(sample_of().x), ["1"])
    found = choose(staged, ["cpu:0", "cpu:1"], sample_of(), 2, schedules=["gpipe", "1f1b"], steps=1)
    assert found.balance == (1, 1)


def test_what_is_wrong_is_told():
    devices = ["cpu:0", "cpu:1"]
    with pytest.raises(MicrobatchError, match="the sample makes 8 micro-batches, not 16"):
        measure(small_model(), devices, sample_of(), [4, 16])
    with pytest.raises(PlanError, match="no schedule serves 2 devices and 5 layers"):
        choose(small_model(), devices, sample_of(), 2, schedules=[], steps=1)
    broken = SampleBatch(torch.zeros(8, 5, dtype=torch.float64), torch.zeros(8, 3), nn.functional.mse_loss)
    with pytest.raises(TaskError, match=r"F\(0,0\) failed"):
        measure(small_model(), devices, broken, [2], steps=1)


# Several hosts


def test_a_plan_places_stages_on_hosts(job, profile, capsys):
    hosts = job.parent / "hosts.toml"
    hosts.write_text(HOSTS)
    command = ["plan", str(job), "--profile", str(profile), "--topology", str(hosts), "--schedules", "1f1b"]
    assert main(command) == 0
    shown = "\n".join(told(capsys.readouterr().out))
    rows = re.findall(r"^((?:left|right)/cpu:\d) +([\d.]+) +(\d) +(\d) +([\d.]+)% *(.*)$", shown, re.MULTILINE)
    assert [row[:3] for row in rows] == [
        ("left/cpu:0", "1", "0"),
        ("left/cpu:1", "0.25", "1"),
        ("right/cpu:0", "1", "2"),
    ]
    assert [row[5].strip() for row in rows] == ["0 ms", "0.1 ms, 1,000 MB/s", ""]
    chosen = tomllib.loads(shown[shown.index("[pipeline]") :])["pipeline"]
    assert chosen["devices"] == [row[0] for row in rows]
    assert chosen["balance"] == [int(row[3]) for row in rows]
    assert re.search(r"^step [\d.]+ ms, [\d.]+% of it waiting for links", shown, re.MULTILINE)
    # The table takes the place of the job's, which is a job on hosts then: also one to plan again.
    rest = JOB.replace(JOB[JOB.index("[pipeline]") : JOB.index("[training]")], "")
    job.write_text(rest + OVERLAP + "\n" + shown[shown.index("[pipeline]") :])
    placed = load_job(job).pipeline
    assert (list(placed.devices), list(placed.balance), placed.workers) == (
        chosen["devices"],
        chosen["balance"],
        "ray",
    )
    again = ["plan", str(job), "--topology", str(hosts), "--schedules", "1f1b", "--microbatches", "2", "--steps", "1"]
    assert main(again) == 0
    assert capsys.readouterr().out.count("left/cpu:1") == 2
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == chosen["devices"] == found["plans"][0]["devices"]
    assert found["plans"][0]["stages"] == [0, 1, 2]
    assert all(0 <= share < 1 for share in found["plans"][0]["link_waits"])


def test_a_topology_that_cannot_be_read_is_named(job, profile, capsys):
    assert main(["plan", str(job), "--profile", str(profile), "--topology", "none.toml"]) == 2
    assert "none.toml: cannot be read" in capsys.readouterr().err
