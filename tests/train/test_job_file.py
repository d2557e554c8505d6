"""Job files: what a right one means, and what one is told about a wrong one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncpipe import cli
from asyncpipe.errors import JobFileError
from asyncpipe.runtime.workers.ray_workers import RayWorkers
from asyncpipe.train.entry import find_entry
from asyncpipe.train.job_file import (
    FaultTable,
    Job,
    JobTable,
    ObserveTable,
    PipelineTable,
    RayTable,
    SnapshotTable,
    TrainingTable,
    load_job,
)
from asyncpipe.train.validation import wrong_keys

RIGHT = """\
name = "linear"

[job]
entry = "settings_workload:build"

[job.parameters]
width = 8

[pipeline]
devices = ["cpu:0", "cpu:1"]
schedule = "gpipe"
balance = [1, 2]

[training]
steps = 3
batch_size = 16
learning_rate = 1

[observe]
metrics_port = 0
trace = "runs/linear.json"
"""

MODULE = """\
from torch import nn
from asyncpipe.train.workload import Workload

def build(*, width, depth=3):
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return Workload(nn.Sequential(*layers), nn.functional.mse_loss, lambda batch_size, generator: iter(()))

def build_nothing(*, width):
    return width

number = 3
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the right job file with replacements, next to its module; returns its path."""
    monkeypatch.delitem(sys.modules, "settings_workload", raising=False)

    def write_job(*replacements: tuple[str, str]) -> Path:
        text = RIGHT
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "settings_workload.py").write_text(MODULE, encoding="utf-8")
        path = tmp_path / "linear.toml"
        path.write_text(text, encoding="utf-8")
        return path

    yield write_job
    sys.modules.pop("settings_workload", None)


def test_a_right_file_gives_its_values_and_the_defaults(write):
    job = load_job(write())
    assert job.name == "linear"
    assert job.job.parameters == {"width": 8}
    assert job.pipeline.devices == ("cpu:0", "cpu:1")
    assert (job.pipeline.microbatches, job.pipeline.checkpoint, job.pipeline.balance) == (8, "except_last", (1, 2))
    assert job.training.learning_rate == 1.0
    assert (job.training.clip, job.training.warmup_steps, job.training.seed) == (None, 0, 0)
    assert job.observe == ObserveTable(metrics_port=0, trace=Path("runs/linear.json"))
    assert job.snapshots is None
    assert job.faults == FaultTable(step_retries=1, snapshot_retries=2, non_finite="fail", most_skipped=10)
    assert job.path.name == "linear.toml"


def test_tables_that_are_there_are_read(write):
    tables = '[snapshots]\nfolder = "runs/s"\n[faults]\nstep_retries = 0\nsnapshot_retries = 5\nnon_finite = "skip"\n'
    job = load_job(write(("[observe]", f"{tables}most_skipped = 3\n[observe]\nnvtx = true\nserve_port = 0")))
    assert job.snapshots == SnapshotTable(folder=Path("runs/s"), every=100, keep=3, keep_every=None, resume=False)
    assert job.faults == FaultTable(step_retries=0, snapshot_retries=5, non_finite="skip", most_skipped=3)
    assert (job.observe.nvtx, job.observe.opentelemetry, job.observe.serve_port) == (True, False, 0)


def test_workers_of_ray_are_made_with_the_options_of_their_table(write):
    overlap = ("learning_rate = 1\n", "learning_rate = 1\noverlap = true\n[faults]\nstep_retries = 0\n")
    table = (
        '[ray]\naddress = "10.0.0.1:6379"\nplacement = "device"\ncpus = 0.5\nplacement_group = "mine"\n\n[observe]\n'
    )
    workers = ('schedule = "gpipe"', 'schedule = "gpipe"\nworkers = "ray"')
    job = load_job(write(overlap, workers, ("[observe]\n", table)))
    assert (job.ray.address, job.ray.placement, job.ray.cpus, job.ray.hosts) == ("10.0.0.1:6379", "device", 0.5, None)
    assert job.ray.placement_group == "mine"
    assert isinstance(job.pool_workers(), RayWorkers)
    assert job.override("pipeline", workers="torchrun").pool_workers() == "torchrun"
    with pytest.raises(JobFileError, match=r"ray\.placement: must be \"host\" or \"device\""):
        load_job(write(overlap, workers, ("[observe]\n", table.replace("device", "rack"))))


@pytest.mark.parametrize(
    "devices",
    [
        '[["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]',
        '[["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]\nreplicas = 2',
        '["cpu:0", "cpu:1", "cpu:2", "cpu:3"]\nreplicas = 2',
    ],
)
def test_devices_of_replicas_are_a_list_for_each_or_one_list(write, devices):
    job = load_job(write(('["cpu:0", "cpu:1"]', devices)))
    assert (job.pipeline.replicas, job.pipeline.row) == (2, ("cpu:0", "cpu:1"))
    assert job.pipeline.devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert PipelineTable.model_validate_json(job.pipeline.model_dump_json()) == job.pipeline
    other = load_job(job.path, {"pipeline.devices": ["cpu:0", "cpu:1"], "pipeline.replicas": None})
    assert other.pipeline.replicas == 1


def test_a_table_that_is_absent_is_made_of_what_overrides_it(write):
    job = load_job(write())
    assert job.override("snapshots", folder=None) == job
    with_table = job.override("snapshots", folder=Path("s"))
    assert with_table.snapshots == SnapshotTable(folder=Path("s"))
    assert with_table.override("snapshots", every=7).snapshots == SnapshotTable(folder=Path("s"), every=7)
    assert with_table.path == job.path


def test_a_job_is_frozen_and_overridden_by_copies(write):
    job = load_job(write())
    with pytest.raises(ValueError, match="frozen"):
        job.training.steps = 9  # type: ignore[misc]
    other = job.override("training", steps=9, clip=None)
    assert (other.training.steps, job.training.steps) == (9, 3)
    assert other.training.batch_size == 16
    assert other.path == job.path


# (what the right file says, what the wrong one says, the key, what else the message holds)
WRONG = [
    ('name = "linear"', "", "name", ["missing", "must be a string"]),
    ('name = "linear"', 'name = ""', "name", ["must be a string that is not empty", 'got ""']),
    ('name = "linear"', 'nam = "linear"', "nam", ["did you mean 'name'", "name, job, pipeline, training, observe"]),
    ("[observe]", "[observ]", "observ", ["unknown key", "known keys: name, job, pipeline, training, observe"]),
    ("settings_workload:build", "settings_workload", "job.entry", ['"module:function"', 'got "settings_workload"']),
    ("width = 8", "", "job.parameters.width", ["missing"]),
    ("width = 8", "width = 8\nwidht = 8", "job.parameters.widht", ["unknown", "width, depth"]),
    ("settings_workload:build", "settings_nowhere:build", "job.entry", ["no module 'settings_nowhere'"]),
    ("settings_workload:build", "settings_workload:bild", "job.entry", ["no function 'bild'", "settings_workload.py"]),
    ("settings_workload:build", "settings_workload:number", "job.entry", ["no function 'number'"]),
    ('["cpu:0", "cpu:1"]', '"cpu:0"', "pipeline.devices", ["list of at least one device name", 'got "cpu:0"']),
    ('["cpu:0", "cpu:1"]', "[]", "pipeline.devices", ["list of at least one device name", "got []"]),
    ('["cpu:0", "cpu:1"]', '["cpu:0", 1]', "pipeline.devices[1]", ["device name", "got 1"]),
    ('["cpu:0", "cpu:1"]', '[["cpu:0"], "cpu:1"]', "pipeline.devices", ["as many devices for each replica", "got [["]),
    ('["cpu:0", "cpu:1"]', '[["a", "b"], ["c"]]', "pipeline.devices", ["as many devices for each replica", "got [["]),
    ('["cpu:0", "cpu:1"]', "[[], []]", "pipeline.devices", ["as many devices for each replica", "got [[], []]"]),
    (
        '["cpu:0", "cpu:1"]',
        '[["cpu:0"], ["cpu:1"]]\nreplicas = 3',
        "pipeline.devices",
        ["has 2 lists, one for each replica, and pipeline.replicas is 3; leave it out"],
    ),
    (
        '["cpu:0", "cpu:1"]',
        '["cpu:0", "cpu:1", "cpu:2"]\nreplicas = 2',
        "pipeline.devices",
        ["must be as many for each of the 2 replicas, which 3 are not"],
    ),
    ('"gpipe"', '"gpipe"\nreplicas = 0', "pipeline.replicas", ["integer of at least 1", "got 0"]),
    ('"gpipe"', '"gpipe"\nshard_optimizer = 1', "pipeline.shard_optimizer", ["must be true or false", "got 1"]),
    (
        '"gpipe"',
        '"gpipe"\nshard_optimizer = true',
        "pipeline.shard_optimizer",
        ["set training.overlap = true, or leave shard_optimizer out"],
    ),
    ('"gpipe"', '"gpipe"\ngradient_dtype = "int8"', "pipeline.gradient_dtype", ['must be "bfloat16", or left out']),
    ('"gpipe"', '"gpipe"\ngradient_dtype = "bfloat16"', "pipeline.gradient_dtype", ["set training.overlap = true"]),
    ('["cpu:0", "cpu:1"]', '["cpu:0", "abacus"]', "pipeline", ["'abacus'", "'cpu:N' and 'cuda:N'"]),
    ('"gpipe"', '"zigzag"', "pipeline.schedule", ["must be one of 1f1b, ", 'got "zigzag"']),
    ('"gpipe"', '"1f1B"', "pipeline.schedule", ["did you mean '1f1b'? must be one of 1f1b, "]),
    ('"gpipe"', "3", "pipeline.schedule", ["must be one of 1f1b, ", "got 3"]),
    (
        '"gpipe"',
        '"gpipe"\ncheckpoint = "some"',
        "pipeline.checkpoint",
        ["always, except_last, selective, never", 'got "some"'],
    ),
    ('"gpipe"', '"gpipe"\nmicrobatches = 0', "pipeline.microbatches", ["integer of at least 1", "got 0"]),
    (
        '"gpipe"',
        '"gpipe"\nmicrobatch = 4',
        "pipeline.microbatch",
        ["did you mean 'microbatches'", "known keys of pipeline"],
    ),
    ('"gpipe"', '"auto"\norder = "hint"', "pipeline.order", ['must be "strict" with schedule "auto", got "hint"']),
    ('"gpipe"', '"auto"\nstages = 2', "pipeline.stages", ['leave it out with schedule "auto"', "got 2"]),
    ("[1, 2]", '"even"', "pipeline.balance", ['"auto" or a list of positive integers', 'got "even"']),
    ("[1, 2]", "[1, 0]", "pipeline.balance", ['"auto" or a list of positive integers', "got [1, 0]"]),
    ("[1, 2]", "[1, 2, 3]", "pipeline", ["3 stages for 2 devices"]),
    ("steps = 3", "steps = 0", "training.steps", ["integer of at least 1", "got 0"]),
    ("steps = 3", 'steps = "3"', "training.steps", ["integer of at least 1", 'got "3"']),
    ("steps = 3", "", "training.steps", ["missing", "integer of at least 1"]),
    ("= 1\n", "= 0\n", "training.learning_rate", ["finite number greater than 0", "got 0"]),
    ("= 1\n", "= nan\n", "training.learning_rate", ["finite number greater than 0", "got NaN"]),
    ("= 1\n", "= 1\noverlap = 1\n", "training.overlap", ["must be true or false", "got 1"]),
    ("= 1\n", "= 1\noverlap = true\n", "training.overlap", ["set faults.step_retries = 0"]),
    ("= 1\n", "= 1\nlr = 1\n", "training.lr", ["known keys of training", "learning_rate"]),
    ("metrics_port = 0", "metrics_port = 70000", "observe.metrics_port", ["0 (any free one) to 65535", "got 70000"]),
    ('trace = "runs/linear.json"', "trace = 3", "observe.trace", ["path of a file", "got 3"]),
    ('trace = "runs/linear.json"', 'trace = "."', "observe.trace", ["is a folder"]),
    ("[observe]", "[snapshots]\n[observe]", "snapshots.folder", ["missing; must be the path of a folder"]),
    ("[observe]", "[snapshots]\nfolder = 3\n[observe]", "snapshots.folder", ["path of a folder", "got 3"]),
    (
        "[observe]",
        '[faults]\nnon_finite = "hope"\n[observe]',
        "faults.non_finite",
        ['"fail", "skip" or "ignore"', "hope"],
    ),
    (
        "[observe]",
        "[faults]\nretries = 1\n[observe]",
        "faults.retries",
        ["did you mean 'step_retries'", "most_skipped"],
    ),
    (
        "[observe]",
        '[snapshots]\nfolder = "s"\nevrey = 9\n[observe]',
        "snapshots.evrey",
        ["did you mean 'every'", "known keys of snapshots: folder, every, keep, keep_every, resume"],
    ),
    (
        'name = "linear"',
        'name = "linear"\nsnapshots = 3',
        "snapshots",
        ["a table with the keys folder, every, keep, keep_every, resume", "got 3"],
    ),
    (
        "[observe]",
        '[snapshots]\nfolder = "settings_workload.py"\n[observe]',
        "snapshots.folder",
        ["cannot use settings_workload.py: File exists"],
    ),
]


@pytest.mark.promise(
    "Refused, not wrong", "Rows of devices of different lengths, and buffers that replicas cannot share, are refused."
)
@pytest.mark.parametrize(("right", "wrong", "key", "parts"), WRONG, ids=[f"{w[2]}: {w[1]}" for w in WRONG])
def test_a_wrong_file_ends_the_command_with_the_key_and_what_is_allowed(
    write, monkeypatch, capsys, right, wrong, key, parts
):
    path = write((right, wrong))
    monkeypatch.chdir(path.parent)
    assert cli.main(["train", str(path), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: {key}: " in error
    for part in parts:
        assert part in error
    assert "Traceback" not in error


def test_all_mistakes_of_a_file_are_told_at_once(write):
    path = write(("steps = 3", "steps = 0"), ('"gpipe"', '"zigzag"'), ("batch_size = 16", "batch = 16"))
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert [line.split(": ")[1] for line in lines] == [
        "pipeline.schedule",
        "training.steps",
        "training.batch_size",
        "training.batch",
    ]


def test_missing_tables_are_told_with_their_keys(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("training = 3\n", encoding="utf-8")
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert "job: missing; must be a table with the keys entry, parameters, model" in str(caught.value)
    assert "training: must be a table with the keys steps, batch_size" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"name = ", "is not valid TOML: Invalid value (at end of document)"),
        (b'name = "a"\n[job\n', "(at line 2, column 5)"),
        (b'name = "\xff"', "is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_why(tmp_path, capsys, content, part):
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert part in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("def build(:", "SyntaxError"),
        ("import settings_nowhere", "ModuleNotFoundError: No module named 'settings_nowhere'"),
        ("raise RuntimeError('out of order')", "RuntimeError: out of order"),
    ],
)
def test_an_entry_whose_module_fails_is_told_why(write, module, part):
    path = write()
    (path.parent / "settings_workload.py").write_text(module, encoding="utf-8")
    with pytest.raises(JobFileError, match=r"job\.entry: module 'settings_workload' could not be imported") as caught:
        find_entry(load_job(path))
    assert part in str(caught.value)


def test_an_entry_must_return_a_workload(write):
    make = find_entry(load_job(write(("workload:build", "workload:build_nothing"))))
    with pytest.raises(JobFileError, match=r"job\.entry: .* must return a Workload, not int"):
        make()


def test_finding_an_entry_leaves_the_import_path_as_it_was(write):
    before = list(sys.path)
    assert find_entry(load_job(write()))().model[0].in_features == 8
    assert sys.path == before


@pytest.mark.parametrize(
    "table", [Job, JobTable, PipelineTable, TrainingTable, ObserveTable, SnapshotTable, FaultTable, RayTable]
)
def test_every_key_says_what_is_allowed(table):
    with pytest.raises(ValidationError) as caught:
        table.model_validate(dict.fromkeys(table.model_fields, object()))
    problems = wrong_keys(caught.value, table)
    assert [problem.key for problem in problems] == list(table.model_fields)
    assert all(problem.text.startswith("must be ") or '"module:function"' in problem.text for problem in problems)
