"""``asyncpipe train`` as an operator uses it: the charlm example, scraped, watched and interrupted."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest
import torch
from preloaded import Program
from prometheus_client.parser import text_string_to_metric_families

from asyncpipe import cli
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import devices_text

SERVED = find_spec("uvicorn") is not None
"""Whether there can be a live view here."""
CHARLM = Path(__file__).parents[2] / "examples" / "charlm"

KILLS = int(os.environ.get("ASYNCPIPE_KILLS", "2"))
"""Of a run, in its test; `make kill-run` has more."""

TINY = """\
name = "tiny"

[job]
entry = "charlm:build"
[job.parameters]
width = 8
blocks = 4
heads = 2
context = 16
sample_length = 12
max_bytes = 20000

[pipeline]
devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
microbatches = 4

[training]
steps = 5
batch_size = 8
learning_rate = 1e-2
warmup_steps = 1
clip = 1.0
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small job of the example's model, in a folder of its own, which is the working directory."""
    shutil.copy(CHARLM / "charlm.py", tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "charlm", raising=False)
    yield path
    sys.modules.pop("charlm", None)


def train(job: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """The lines that a run prints which ends well."""
    assert cli.main(["train", str(job), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def observed(name: str) -> list[str]:
    """The options for a trace and a timeline."""
    return ["--set", f"observe.trace={name}.json", "--set", f"observe.timeline={name}.svg"]


def test_a_run_prints_progress_a_summary_and_a_sample(job, capsys):
    lines = train(job, capsys)
    assert lines[0].startswith("tiny: ")
    assert lines[0].endswith("5 steps on cpu:0, cpu:1, cpu:2, cpu:3")
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/5", "step 5/5"]
    assert any(line.startswith("tiny: 5 steps in ") and "loss 4." in line for line in lines)
    assert any(line.startswith("held-out loss 4.") for line in lines)
    sample = "\n".join(lines[lines.index("sample:") + 1 :])
    assert sample.startswith("def ")
    assert len(sample) == len("def ") + 12
    assert not (job.parent / "runs").exists()


def test_trace_and_timeline_are_written(job, capsys):
    lines = train(job, capsys, "--steps", "2", *observed("runs/t"), "--no-progress")
    assert lines[0].startswith("tiny: 2 steps in ")
    assert_trace(Path("runs/t.json"), steps=2, devices=4)
    assert_picture(Path("runs/t.svg"))


def test_the_commands_that_go_on_from_a_run_do_what_they_say(job, capsys):
    text = TINY.replace("clip = 1.0\n", "overlap = true\n").replace("sample_length", 'prompt = "def "\nsample_length')
    job.write_text(f"{text}[faults]\nstep_retries = 0\n", encoding="utf-8")
    lines = train(job, capsys, "--resume", "runs/s", "--no-progress")
    *_, generate, longer, processes = [line.partition("#")[0].split() for line in lines]
    assert generate[2:] == [str(job), "--resume", "runs/s", "--set", "'job.parameters.prompt=\"class", "\"'"]
    assert processes[-4:] == ["--resume", "runs/s-processes", "--workers", "processes"]
    lines = train(job, capsys, "--resume", "runs/s", "--set", 'job.parameters.prompt="class "', "--no-progress")
    assert any(line.startswith("class ") for line in lines)
    assert any(line.startswith("tiny: 10 steps in") for line in train(job, capsys, *longer[3:], "--no-progress"))


def test_snapshots_are_taken_and_the_last_one_is_told(job, capsys):
    job.write_text(TINY + '[snapshots]\nfolder = "elsewhere"\nevery = 2\nkeep = 1\n', encoding="utf-8")
    lines = train(job, capsys, "--set", "snapshots.folder=runs/s", "--no-progress")
    assert f"snapshot: {Path('runs/s/step-5')}" in lines
    assert lines[-3:-1] == ["next:", f"  asyncpipe train {job} --resume runs/s    # generates from the model"]
    assert lines[-1] == f"  asyncpipe train {job} --resume runs/s --steps 10    # trains it longer"
    assert [path.name for path in Path("runs/s").iterdir()] == ["step-5"]
    assert not Path("elsewhere").exists()
    assert cli.main(["train", str(job), "--set", "snapshots.folder=runs/s"]) == 2
    assert f"{job}: snapshots.folder: runs/s holds snapshots of another run" in capsys.readouterr().err


def test_a_run_goes_on_with_resume_and_says_from_where(job, capsys):
    assert train(job, capsys, "--steps", "2", "--resume", "s")[0].startswith("tiny: ")  # Afresh: there is none.
    lines = train(job, capsys, "--steps", "4", "--set", "snapshots.folder=s", "--resume")
    assert lines[0] == f"going on after step 2, from {Path('s') / 'step-2'} (training.steps: 4, was 2)"
    assert any(line.startswith("tiny: 4 steps in ") for line in lines)
    job.write_text(TINY + '[snapshots]\nfolder = "s"\nresume = true\n', encoding="utf-8")
    lines = train(job, capsys)
    assert lines[0].startswith(f"going on after step 4, from {Path('s') / 'step-4'} ")
    assert f"snapshot: {Path('s') / 'step-5'}" in lines
    assert sorted(path.name for path in Path("s").iterdir()) == ["step-2", "step-4", "step-5"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--resume"], "--resume: the job has no folder for snapshots; give one, as in --resume runs/mine"),
        (["--resume", "a", "--set", "snapshots.folder=b"], "snapshots.folder is given twice: 'a', then 'b'"),
        (["--resume", "charlm.py"], "snapshots.folder: cannot use charlm.py: File exists"),
    ],
)
def test_a_folder_that_a_run_cannot_go_on_in_ends_the_command(job, capsys, options, part):
    assert cli.main(["train", str(job), *options]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.promise(
    "Killed and resumed", "A run that is killed and resumed again and again ends with bit-identical results."
)
@pytest.mark.long
@pytest.mark.timeout(60 + 60 * KILLS)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(job, capsys):
    steps = 14 * KILLS
    text = TINY.replace("sample_length = 12", "sample_length = 1\ndropout = 0.2").replace(
        "steps = 5", f"steps = {steps}"
    )
    job.write_text(text + '[snapshots]\nfolder = "s"\nevery = 1\nkeep = 2\n', encoding="utf-8")
    command = ("train", str(job), "--resume", "--no-progress")
    instants = random.Random(6)
    begun = 0
    for _ in range(KILLS):
        with started(*command) as process:
            begun = wait_for_step(process, Path("s"), begun + instants.randint(1, 10), instants.uniform(0, 0.02))
            process.kill()
            _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (-signal.SIGKILL, "")
        assert 0 < begun < steps
    train(job, capsys, "--resume", "--no-progress")
    train(job, capsys, "--set", "snapshots.folder=whole", "--no-progress")
    for name in ("model", "optimizer"):
        assert Path(f"s/step-{steps}/{name}.pt").read_bytes() == Path(f"whole/step-{steps}/{name}.pt").read_bytes()
    assert losses(Path(f"s/step-{steps}")) == losses(Path(f"whole/step-{steps}"))


def wait_for_step(process: Program, folder: Path, step: int, more: float) -> int:
    """Returns ``more`` seconds after there is a snapshot of ``step`` or later; the newest one's."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and process.poll() is None:
        if folder.exists() and (newest := newest_step(folder)) >= step:
            time.sleep(more)
            return max(newest, newest_step(folder))
        time.sleep(0.001)
    assert process.stderr is not None
    raise AssertionError(f"there is no snapshot of step {step}: {process.poll()}")


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()), default=0)


def losses(snapshot: Path) -> list[float]:
    """Those of the last 20 steps, to the last bit."""
    run = torch.load(snapshot / "run.pt", weights_only=True)
    assert len(run["meter"]["recent"]) == 20
    return [recent["loss"] for recent in run["meter"]["recent"]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no limit on the size of files")
def test_files_that_cannot_be_written_whole_do_not_end_a_run(job):
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); "
    command = limited + "from asyncpipe import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = "sys.dont_write_bytecode = True; " + command  # The limit would cut that, too.
    options = ["--set", "snapshots.folder=s", *observed("t"), "--no-progress"]
    with Program("import sys; " + command, "train", str(job), *options) as process:
        out, err = process.communicate(timeout=50)
    assert process.returncode == 0
    assert out.startswith("tiny: 5 steps in ")
    assert not any(line.startswith(("trace: ", "timeline: ", "snapshot: ")) for line in out.splitlines())
    assert err.splitlines() == [
        "no snapshot of step 5 in s: File too large",
        "the trace t.json was not written: File too large",
        "the timeline t.svg was not written: File too large",
    ]
    assert not list(Path("s").iterdir())
    assert {path.name for path in Path().iterdir()} == {"charlm.py", "tiny.toml", "s"}


def test_the_loss_does_not_depend_on_the_devices(job, capsys):
    def loss(*options: str) -> str:
        return next(line.split("loss ")[1][:5] for line in train(job, capsys, "--no-progress", *options))

    assert loss("--devices", "cpu:0") == loss("--devices", "cpu:0,cpu:1") == loss("--device-type", "cpu")


def test_the_examples_own_job_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "charlm", raising=False)
    lines = train(CHARLM / "charlm.toml", capsys, "--steps", "1")
    assert "step 1/1  loss 4.5" in "\n".join(lines)
    assert_trace(tmp_path / "runs" / "charlm.json", steps=1, devices=4)
    assert_picture(tmp_path / "runs" / "charlm.svg", "charlm")


def test_a_parameter_that_the_example_cannot_use_is_told(job, capsys):
    job.write_text(TINY.replace("heads = 2", "heads = 3"), encoding="utf-8")
    assert cli.main(["train", str(job)]) == 2
    assert f"{job}: job.parameters: width must be a multiple of heads, got width 8" in capsys.readouterr().err


def test_cuda_on_a_machine_without_it_is_told(job, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.main(["train", str(job), "--device-type", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "devices"), [("cuda", "cuda:0, cuda:1, cuda:2, cuda:0"), ("cpu", "cpu:0, cpu:1, cpu:2, cpu:3")]
)
def test_a_job_is_mapped_onto_the_devices_of_a_kind_in_turn(job, monkeypatch, kind, devices):
    class Built(Exception):
        """Ends the command before it trains."""

    def build(job: Job, *_: object, **__: object) -> None:
        raise Built(", ".join(job.pipeline.devices))

    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("asyncpipe.train.lasting_run.LastingRun", build)
    with pytest.raises(Built, match=f"^{devices}"):
        cli.main(["train", str(job), "--device-type", kind])


@pytest.mark.parametrize(
    ("devices", "options", "rows"),
    [
        ('[["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]', (), "cpu:0, cpu:1 | cpu:2, cpu:3"),
        ('[["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]', ("--device-type", "cuda"), "cuda:0, cuda:1 | cuda:2, cuda:3"),
        ('["cpu:0", "cpu:1", "cpu:2", "cpu:3"]', ("--replicas", "2"), "cpu:0, cpu:1 | cpu:2, cpu:3"),
        ('["cpu:0"]', ("--devices", "cpu:1,cpu:2", "--replicas", "2"), "cpu:1 | cpu:2"),
        ('[["cpu:0"], ["cpu:1"]]', ("--devices", "cpu:1,cpu:2"), "cpu:1, cpu:2"),
    ],
)
def test_replicas_have_their_devices_by_the_file_or_by_options(job, monkeypatch, devices, options, rows):
    class Built(Exception):
        """Ends the command before it trains."""

    def build(job: Job, *_: object, **__: object) -> None:
        raise Built(devices_text(job.pipeline.devices, job.pipeline.replicas))

    job.write_text(re.sub(r"(?m)^devices = .*$", f"devices = {devices}", job.read_text()), encoding="utf-8")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("asyncpipe.train.lasting_run.LastingRun", build)
    with pytest.raises(Built, match=f"^{re.escape(rows)}$"):
        cli.main(["train", str(job), *options])


@pytest.mark.cuda
def test_a_run_on_cuda(job, capsys):
    lines = train(job, capsys, "--device-type", "cuda", *observed("t"), "--set", "observe.nvtx=true", "--resume", "s")
    assert any(line.startswith("held-out loss 4.") for line in lines)
    assert_trace(Path("t.json"), steps=3, devices=4)
    assert f"snapshot: {Path('s') / 'step-5'}" in lines


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--steps", "0"], "must be an integer of at least 1"),
        (["--serve", "web"], "must be a port from 0 (any free one) to 65535"),
        (["--devices", "cpu:0,,cpu:1"], "must be names with commas between them"),
        (["--devices", "cpu:0", "--device-type", "cpu"], "not allowed with argument"),
        (["--set", "training.steps"], "must be KEY=VALUE, as training.steps=200; got 'training.steps'"),
    ],
)
def test_a_wrong_option_ends_the_command_with_what_is_allowed(job, capsys, options, part):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", str(job), *options])
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            ["training.stepps=3"],
            "training.stepps: unknown key; did you mean 'steps'? known keys of training: steps",
        ),
        (["pipelin.microbatches=3"], "pipelin: unknown key; did you mean 'pipeline'? known keys: name, job, pipeline,"),
        (["training.steps=many"], 'training.steps: must be an integer of at least 1, got "many"'),
        (["training.steps=2.0"], "training.steps: must be an integer of at least 1, got 2.0"),
        (["training=3"], "training: must be a table with the keys steps, batch_size"),
        (["training.steps.of=3"], "training.steps.of: must be the key of a value, as training.steps"),
        (["observe.metrics_port=70000"], "observe.metrics_port: must be"),
        (["pipeline.workers=processes"], "pipeline.workers: gradients stay in the workers"),
        (["training.steps=3", "training.steps=4"], "training.steps is given twice: 3, then 4"),
        (["service.weight=2"], "service.weight: [service] is read by asyncpipe jobs submit, not by asyncpipe train"),
        (["training.batch_size=none"], "training.batch_size: missing; must be an integer of at least 1"),
    ],
)
def test_a_wrong_key_or_value_of_set_is_told_with_what_is_allowed(job, capsys, changes, part):
    assert cli.main(["train", str(job), *(word for change in changes for word in ("--set", change))]) == 2
    told = capsys.readouterr().err
    assert f"asyncpipe: error: {part}" in told or f"asyncpipe: error: {job}: {part}" in told


@pytest.mark.parametrize(
    ("package", "option", "extra"),
    [("uvicorn", "observe.serve_port=0", ".[service]"), ("opentelemetry", "observe.opentelemetry=true", ".[otel]")],
)
def test_an_extra_that_is_not_installed_ends_the_command_before_it_trains(
    job, capsys, monkeypatch, package, option, extra
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "asyncpipe.observe.http_server", raising=False)  # It has imported uvicorn before.
    assert cli.main(["train", str(job), "--set", option]) == 2
    out, err = capsys.readouterr()
    assert extra in err
    assert out == ""


@pytest.mark.parametrize(
    ("number", "status", "workers"),
    [(signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)],
    ids=["SIGTERM", "SIGINT-workers"],
)
def test_a_signal_ends_a_long_run_that_is_being_scraped(job, number, status, workers):
    if workers:
        text = TINY.replace("[training]", 'schedule = "interleaved"\n[training]')
        job.write_text(text.replace("clip = 1.0", "overlap = true\n[faults]\nstep_retries = 0"), encoding="utf-8")
    options = ["--steps", "1000000", "--set", "observe.metrics_port=0", *observed("t")]
    options += ["--workers", "processes", "--devices", "cpu:0,cpu:1"] if workers else []
    options += ["--set", "snapshots.folder=s", *(["--serve", "0"] if SERVED else [])]
    with started("train", str(job), *options) as process:
        assert process.stdout is not None
        url = wait_for(process, "metrics: ").removeprefix("metrics: ").strip()
        page = wait_for(process, "live view: ").removeprefix("live view: ").strip() if SERVED else None
        assert wait_for(process, "tiny: ").rstrip().endswith(" in 2 worker processes") is workers
        wait_for(process, "step 20/")
        assert_metrics(url)
        if page is not None:
            assert_page(page)
        os.killpg(process.pid, number)  # As a terminal does: its workers get it as well.
        out, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in err
    assert out.rstrip().endswith(f"stopped by {number.name}")
    assert "tiny: " in out
    assert "sample:" not in out
    assert_trace(job.parent / "t.json", steps=3, devices=2 if workers else 4)
    assert_picture(job.parent / "t.svg")
    (done,) = re.findall(r"tiny: (\d+) steps in ", out)
    assert f"snapshot: {Path('s') / f'step-{done}'}" in out.splitlines()
    assert (job.parent / "s" / f"step-{done}" / "snapshot.json").exists()


@contextmanager
def started(*arguments: str) -> Iterator[Program]:
    """``asyncpipe`` with these arguments, in a process that does not outlive the block."""
    code = "import sys; from asyncpipe import cli; sys.exit(cli.main())"
    with Program(code, *arguments, own_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: Program, beginning: str) -> str:
    """The next line of output that begins so; fails if the process ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    assert process.stderr is not None
    raise AssertionError(f"ended before it printed {beginning!r}: {process.stderr.read()}")


def assert_metrics(url: str) -> None:
    with urlopen(url, timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    steps = families["asyncpipe_steps"].samples
    assert {sample.labels["job"] for sample in steps} == {"tiny"}
    outcomes = {sample.labels["outcome"]: sample.value for sample in steps}
    assert outcomes.pop("ok") >= 20
    assert not any(outcomes.values())
    assert families["asyncpipe_tokens"].samples[0].value >= 20 * 8 * 16
    assert 0 < families["asyncpipe_loss"].samples[0].value < 10
    assert {sample.labels["stage"] for sample in families["asyncpipe_stage_busy_seconds"].samples} == set("0123")


def assert_page(page: str) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", page)
    with urlopen(page, timeout=10) as answer:
        assert "<html" in answer.read().decode()
    with urlopen(page + "state", timeout=10) as answer:
        state = json.load(answer)
    assert state["job"] == "tiny"
    assert state["training"]["steps"] >= 1  # It may be that of a moment ago.


def assert_trace(path: Path, *, steps: int, devices: int) -> None:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and "kind" in event["args"]]
    assert len({event["args"]["step"] for event in slices}) == steps
    assert len({event["pid"] for event in slices}) == devices
    assert {event["args"]["kind"] for event in slices} - {"U"} == {"F", "R", "B", "C"}


def assert_picture(path: Path, name: str = "tiny") -> None:
    picture = ElementTree.parse(path).getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert name in "".join(picture.itertext())
