"""What a client may say of a job: what becomes of it, and everything that is refused before anything runs."""

from __future__ import annotations

import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import Field, SecretStr
from torch import nn

from asyncpipe.service.job_states import JobRecord, JobState, PriorityClass
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import (
    MOST_ACTIONS,
    Submission,
    SubmissionError,
    check_amendment,
    check_new_schedule,
    check_submission,
    job_of,
)
from asyncpipe.train.job_file import Job
from asyncpipe.train.workload import Workload

RIGHT: dict[str, Any] = {
    "name": "a job",
    "entry": "demo:build",
    "parameters": {"width": 8},
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "schedule": "gpipe", "balance": [1, 2]},
    "training": {"steps": 3, "batch_size": 16, "learning_rate": 1},
}


def build(
    *,
    width: Annotated[int, Field(ge=1, le=64)],
    rate: float = 0.1,
    sizes: tuple[int, ...] = (),
    data: Path = Path("data"),
) -> Workload:
    """A small workload."""
    return Workload(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, lambda batch_size, generator: iter(()))


ENTRIES = Entries({"demo:build": build, "other:build": build})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)


def service(**settings: Any) -> ServiceSettings:
    given_ = {"devices": ["cpu:0", "cpu:1"], "entries": ["demo:build"], "folder": "runs/s", **settings}
    return ServiceSettings(**given_)


SERVICE = service()


def changed(key: str, value: Any) -> dict[str, Any]:
    """The right submission with another value at the dotted ``key``."""
    submission = json.loads(json.dumps(RIGHT))
    *tables, last = key.split(".")
    table = submission
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value
    return submission


def problems(submission: Any, settings: ServiceSettings = SERVICE) -> dict[str, str]:
    with pytest.raises(SubmissionError) as told:
        check_submission(submission, settings, ENTRIES)
    assert str(told.value) == "\n".join(f"{key}: {text}" if key else text for key, text in told.value.problems)
    assert "\x00" not in str(told.value)
    found = dict(told.value.problems)
    assert len(found) == len(told.value.problems), "each key is told once"
    return found


def record(document: dict[str, Any], **more: Any) -> JobRecord:
    return JobRecord("01abc", document, JobState.QUEUED, "submitted", 0.0, 0.0, **more)


# What becomes of it


def test_a_submission_becomes_a_job_with_the_services_own_folder():
    kept = record(check_submission(RIGHT, SERVICE, ENTRIES))
    found = (kept.name, kept.entry, kept.priority_class, kept.weight, kept.tags, kept.deadline, kept.memory)
    assert found == ("a job", "demo:build", PriorityClass.FOREGROUND, 1.0, (), None, None)
    job = job_of(kept, SERVICE)
    assert isinstance(job, Job)
    assert job.job.parameters == {"width": 8}
    assert (job.pipeline.devices, job.pipeline.balance, job.pipeline.microbatches) == (("cpu:0", "cpu:1"), (1, 2), 8)
    assert job.training.learning_rate == 1.0
    assert job.snapshots is not None
    assert (job.snapshots.folder, job.snapshots.resume) == (Path("runs/s/jobs/01abc/snapshots"), True)
    assert (job.snapshots.every, job.snapshots.keep, job.snapshots.keep_every) == (100, 3, None)
    assert str(job.path) == "job 01abc"


def test_a_kept_job_has_its_defaults_written_down():
    """So that another version's defaults do not change a job that was acknowledged."""
    document = check_submission(RIGHT, SERVICE, ENTRIES)
    assert document["training"]["weight_decay"] == 0.0
    assert document["snapshots"] == {"every": 100, "keep": 3, "keep_every": None}
    assert set(document["faults"]) >= {"step_retries", "snapshot_retries", "non_finite"}


def test_a_submission_may_be_json_a_table_or_a_model():
    by_table = check_submission(RIGHT, SERVICE, ENTRIES)
    text = json.dumps(RIGHT)
    assert check_submission(text, SERVICE, ENTRIES) == by_table
    assert check_submission(text.encode(), SERVICE, ENTRIES) == by_table
    assert check_submission(Submission.model_validate_json(text), SERVICE, ENTRIES) == by_table


names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=200)
counts = st.integers(1, 10**6)
submissions = st.fixed_dictionaries(
    {
        "name": names,
        "entry": st.just("demo:build"),
        "pipeline": st.fixed_dictionaries(
            {"devices": st.just(["cpu:0", "cpu:1"])},
            optional={
                "microbatches": st.integers(1, 4096),
                "schedule": st.sampled_from(
                    ["gpipe", "1f1b", "eager-1f1b", "eager-1f1b(cap=3)", "interleaved", "auto"]
                ),
                "checkpoint": st.sampled_from(["always", "except_last", "never"]),
                "balance": st.just("auto"),
            },
        ),
        "training": st.fixed_dictionaries(
            {
                "steps": counts,
                "batch_size": counts,
                "learning_rate": st.floats(1e-300, 1e300) | counts,
            },
            optional={
                "warmup_steps": st.integers(0, 10**9),
                "weight_decay": st.floats(0, 10),
                "clip": st.none() | st.floats(1e-9, 1e9),
                "seed": st.integers(0, 2**63 - 1),
            },
        ),
        "parameters": st.fixed_dictionaries(
            {"width": st.integers(1, 64)},
            optional={"rate": st.floats(allow_nan=False, allow_infinity=False), "sizes": st.lists(st.integers(0, 9))},
        ),
    },
    optional={
        "snapshots": st.fixed_dictionaries(
            {}, optional={"every": counts, "keep": st.integers(1, 100), "keep_every": counts}
        ),
        "faults": st.fixed_dictionaries({}, optional={"step_retries": st.integers(0, 1000)}),
        "priority_class": st.sampled_from(["foreground", "background"]),
        "weight": st.floats(1e-9, 1e6),
    },
)


@given(submissions)
@hypothesis_settings(max_examples=100)
def test_what_was_submitted_is_what_runs(submission):
    """Submission → JobRecord → Job: nothing is lost and nothing changes on the way."""
    kept = record(check_submission(json.dumps(submission), SERVICE, ENTRIES))
    job = job_of(kept, SERVICE).model_dump(mode="json")
    assert (kept.priority_class, kept.weight) == (
        submission.get("priority_class", "foreground"),
        submission.get("weight", 1.0),
    )
    assert job["name"] == submission["name"]
    assert job["job"] == {"entry": submission["entry"], "parameters": submission["parameters"], "model": None}
    for table in ("pipeline", "training", "snapshots", "faults"):
        for key, value in submission.get(table, {}).items():
            assert job[table][key] == value


# What is refused

# (key, value, the key that is told, a part of the text)
WRONG: list[tuple[str, Any, str, str]] = [
    ("name", "", "name", "must be a printable text of 1 to 200 characters"),
    ("name", "x" * 201, "name", "must be a printable text"),
    ("name", "two\nlines", "name", "must be a printable text"),
    ("name", "\x1b[31mred", "name", "must be a printable text"),
    ("name", " padded", "name", "must be a printable text"),
    ("name", 3, "name", "must be a printable text"),
    ("entry", "os:system", "entry", 'must be a registered entry: demo:build, other:build; got "os:system"'),
    ("entry", "x" * 201, "entry", "must be the name of a registered entry"),
    ("entry", ["demo:build"], "entry", "must be the name of a registered entry"),
    ("extra", 1, "extra", "unknown key; "),
    ("observe", {"trace": "/etc/x"}, "observe", "unknown key"),
    ("pipeline.devices", [], "pipeline.devices", "at least one device"),
    (
        "pipeline.devices",
        ["cpu:0", "cuda:0"],
        "pipeline.devices",
        'devices of this service: cpu:0, cpu:1; got "cuda:0"',
    ),
    ("pipeline.devices", ["cpu:0", "cpu:0"], "pipeline.devices", "must have cpu:0 at most 1 times, got it 2 times"),
    ("pipeline.devices", ["cpu:0"] * 9999, "pipeline.devices", "must be at most 2, got 9999"),
    ("pipeline.devices", "cpu:0", "pipeline.devices", "must be a list"),
    (
        "pipeline.devices",
        [["cpu:0", "cpu:9"]],
        "pipeline.devices",
        'devices of this service: cpu:0, cpu:1; got "cpu:9"',
    ),
    ("pipeline.devices", [["cpu:0"], []], "pipeline.devices", "must be a list of as many devices for each replica"),
    ("pipeline.replicas", 2, "pipeline.schedule", "got 2 stages for 1 device"),
    ("pipeline.replicas", 1025, "pipeline.replicas", "must be an integer from 1 to 1024, got 1025"),
    ("pipeline.shard_optimizer", True, "", "pipeline.shard_optimizer: is for replicas that have"),
    ("pipeline.schedule", "csv:/etc/passwd", "pipeline.schedule", "must be one of 1f1b, "),
    ("pipeline.schedule", "os:system", "pipeline.schedule", "must be one of"),
    ("pipeline.schedule", "os:system(x=1)", "pipeline.schedule", "must be one of"),
    ("pipeline.schedule", "gpipe(__class__)", "pipeline.schedule", "options are integers by name"),
    ("pipeline.schedule", "gpipe(x=1)", "pipeline.schedule", "cannot be made"),
    ("pipeline.schedule", "eager-1f1b(cap=0)", "pipeline.schedule", "cap must be a positive integer"),
    ("pipeline.schedule", f"eager-1f1b(cap={'9' * 5000})", "pipeline.schedule", "must be one of"),
    ("pipeline.schedule", None, "pipeline.schedule", "must be one of"),
    ("pipeline.order", "loose", "pipeline.order", 'must be "strict" or "hint"'),
    ("pipeline.balance", [1, 1, 1], "pipeline.schedule", "balance [1, 1, 1] has 3 entries for 2 devices"),
    ("pipeline.schedule", "1f1B", "pipeline.schedule", "did you mean '1f1b'? must be one of 1f1b, "),
    ("pipeline.stages", 3, "pipeline.schedule", "got 3 stages for 2 devices"),
    ("pipeline.stages", 1025, "pipeline.stages", "must be an integer from 1 to 1024, got 1025"),
    ("pipeline.microbatches", 4097, "pipeline.microbatches", "must be an integer from 1 to 4096, got 4097"),
    ("pipeline.microbatches", 8.0, "pipeline.microbatches", "must be an integer"),
    ("training.steps", 10**9 + 1, "training.steps", "must be an integer from 1 to 1000000000"),
    ("training.steps", True, "training.steps", "must be an integer"),
    ("training.steps", "3", "training.steps", "must be an integer"),
    ("training.batch_size", 10**6 + 1, "training.batch_size", "must be an integer from 1 to 1000000"),
    ("training.learning_rate", 0, "training.learning_rate", "must be a finite number greater than 0"),
    ("training.stepz", 3, "training.stepz", "did you mean 'steps'?"),
    ("training", [], "training", "must be a table with the keys steps, batch_size"),
    ("snapshots.folder", "/tmp/x", "snapshots.folder", "unknown key; known keys of snapshots: every, keep, keep_every"),
    ("snapshots.resume", True, "snapshots.resume", "unknown key"),
    ("snapshots.keep", 101, "snapshots.keep", "must be an integer from 1 to 100, got 101"),
    ("faults.step_retries", 10**9, "faults.step_retries", "must be an integer up to 1000"),
    ("priority_class", "urgent", "priority_class", "must be one of foreground, background"),
    ("weight", 0, "weight", "must be a number above 0, up to 1e+06, got 0"),
    ("weight", 1e7, "weight", "must be a number above 0"),
    ("weight", True, "weight", "must be a number above 0"),
    ("tags", ["a b"], "tags[0]", "must be a list of up to 20 tags"),
    ("tags", [f"x{i}" for i in range(21)], "tags", "must be a list of up to 20 tags"),
    ("deadline", 0, "deadline", "must be a Unix time in seconds, before the year 10000"),
    ("memory", "lots", "memory", "must be a number of bytes, as 8589934592 or 8GiB"),
    ("memory", 0, "memory", "must be a number of bytes"),
    ("parameters", [], "parameters", "must be a table of keyword arguments"),
    ("parameters", {"width": 8, "sizes": list(range(30_000))}, "", "the submission takes"),
]


@pytest.mark.parametrize(("key", "value", "told", "part"), WRONG, ids=[f"{w[0]}={w[1]!r:.30}" for w in WRONG])
def test_each_wrong_key_is_told(key, value, told, part):
    found = problems(changed(key, value))
    assert list(found) == [told]
    assert part in found[told]
    assert len(found[told]) < 500


def test_every_wrong_key_is_told_at_once():
    wrong = changed("training.steps", 0)
    wrong["pipeline"]["schedule"] = "csv:x"
    wrong["weight"] = -1
    del wrong["name"]
    assert set(problems(wrong)) == {"training.steps", "pipeline.schedule", "weight", "name"}
    also = changed("entry", "nobody:knows")
    also["pipeline"]["devices"] = ["cpu:0", "cpu:9"]
    assert set(problems(also)) == {"entry", "pipeline.devices"}
    also["training"]["steps"] = 0
    assert set(problems(also)) == {"training.steps", "entry", "pipeline.devices"}
    del also["training"]
    also.update(entry="demo:build", parameters={"width": 99, "data": "x"})
    assert set(problems(also)) == {"training", "pipeline.devices", "parameters.data"}


RAW = [b"", b"[]", b"3", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'{"name": "\\ud800"}', "{}"]


@pytest.mark.parametrize("raw", RAW, ids=[repr(raw[:12]) for raw in RAW])
def test_what_is_no_submission_at_all_is_refused(raw):
    assert problems(raw)


def test_values_that_json_has_not_are_refused():
    loop: dict[str, Any] = {}
    loop["again"] = loop
    for value in (float("nan"), float("inf"), object(), loop, {1: 2, (): 3}, b"x"):
        assert problems(changed("parameters.width", 1) | {"parameters": {"width": value}})


def test_as_much_as_can_be_wrong_is_told_in_a_few_lines():
    found = problems({**RIGHT, **{f"key{i}{'x' * 5000}": i for i in range(3000)}})
    assert len(found) <= 21
    assert all(len(key) < 100 and len(text) < 500 for key, text in found.items())
    assert found[""] == "and 2980 more"


def test_the_task_graph_has_a_bound():
    big = changed("pipeline.microbatches", 4096)
    big["pipeline"].update(schedule="interleaved", balance="auto", stages=MOST_ACTIONS // 4096 * 2)
    assert "65536 stages times micro-batches" in problems(big)["pipeline"]
    big["pipeline"]["stages"] //= 2
    check_submission(big, SERVICE, ENTRIES)


def test_what_a_schedule_cannot_serve_is_refused_before_anything_runs():
    assert (
        "only an ordered schedule can be a hint"
        in problems(changed("pipeline", {**RIGHT["pipeline"], "schedule": "backward-first", "order": "hint"}))[
            "pipeline.schedule"
        ]
    )
    even = changed("pipeline", {"devices": ["cpu:0", "cpu:1"], "schedule": "interleaved", "stages": 3})
    assert "the same number of stages on each device" in problems(even)["pipeline.schedule"]


def test_a_schedule_that_is_chosen_by_measuring_chooses_the_stages():
    auto = changed("pipeline", {"devices": ["cpu:0", "cpu:1"], "schedule": "auto"})
    check_submission(auto, SERVICE, ENTRIES)
    auto["pipeline"].update(order="hint", stages=2)
    assert set(problems(auto)) == {"pipeline.order", "pipeline.stages"}


def test_a_device_may_be_named_as_often_as_the_operator_names_it():
    twice = service(devices=["cpu:0", "cpu:0", "cpu:1"])
    check_submission(changed("pipeline.devices", ["cpu:0", "cpu:0"]), twice, ENTRIES)
    (found,) = problems(changed("pipeline.devices", ["cpu:1", "cpu:1"]), twice).values()
    assert "cpu:1 at most 1 times" in found


@pytest.mark.parametrize(
    ("schedule", "part"),
    [
        ("auto", "chosen by measuring"),
        ("csv:x", "must be one of"),
        ("os:system", "must be one of"),
        ("eager-1f1b(cap=0)", "cap must be"),
        ("x" * 1000, "must be one of"),
    ],
)
def test_a_new_schedule_is_checked_like_the_first(schedule, part):
    kept = record(check_submission(RIGHT, SERVICE, ENTRIES))
    assert check_new_schedule(kept, "1f1b")["schedule"] == "1f1b"
    check_new_schedule(kept, "eager-1f1b(cap=2)")
    with pytest.raises(SubmissionError) as told:
        check_new_schedule(kept, schedule)
    ((key, text),) = told.value.problems
    assert key == "schedule"
    assert part in text


def test_a_new_schedule_must_serve_the_jobs_stages():
    interleaved = changed("pipeline", {"devices": ["cpu:0", "cpu:1"], "schedule": "interleaved", "stages": 4})
    kept = record(check_submission(interleaved, SERVICE, ENTRIES))
    check_new_schedule(kept, "looped-bfs")
    with pytest.raises(SubmissionError, match="schedule: schedule '1f1b' puts one stage on each device"):
        check_new_schedule(kept, "1f1b")


def test_what_another_version_kept_and_this_one_cannot_read_is_told():
    other = record({**check_submission(RIGHT, SERVICE, ENTRIES), "training": {"epochs": 3}})
    with pytest.raises(SubmissionError, match=r"training\.steps: missing"):
        job_of(other, SERVICE)


def test_declared_memory_has_to_fit_on_each_device():
    limited = service(memory_limit={"cpu:0": "3 GiB", "cpu:1": "2 GiB"})
    kept = record(check_submission(changed("memory", "2 GiB"), limited, ENTRIES))
    assert kept.memory == 2 * 1024**3
    told = "must be at most 2 GiB, which jobs may have of cpu:1; got 2.5 GiB"
    assert problems(changed("memory", 5 * 2**29), limited) == {"memory": told}
    with pytest.raises(SubmissionError, match="memory: must be at most 1 GiB"):  # The limit was lowered meanwhile.
        job_of(kept, service(memory_limit={"cpu:0": "1 GiB"}))
    assert job_of(kept, SERVICE).name == kept.name


HOSTS = [f"{host}/cuda:{number}" for host in "ab" for number in range(2)]
LARGE = service(devices=HOSTS, memory_limit=dict.fromkeys(HOSTS[:3], "3 GiB") | {HOSTS[3]: "1 GiB"})


@pytest.mark.parametrize(
    ("devices", "kept", "memory"),
    [
        (2, {"count": 2, "hosts": None}, None),
        ({"count": 2, "hosts": 1}, {"count": 2, "hosts": 1}, None),
        ({"count": 2, "hosts": 1, "memory": "3 GiB"}, {"count": 2, "hosts": 1}, 3 << 30),
    ],
)
def test_a_job_may_ask_for_any_devices(devices, kept, memory):
    document = check_submission(changed("pipeline.devices", devices), LARGE, ENTRIES)
    assert (document["pipeline"]["devices"], document["memory"]) == (kept, memory)
    assert check_submission(document, LARGE, ENTRIES) == document, "as a copy of it is"
    job = record(document)
    assert (job.devices, str(job.request)) == ((), "any 2" + (" on 1 host" if kept["hosts"] else ""))
    assert job_of(replace(job, placed=tuple(HOSTS[:2])), LARGE).pipeline.devices == tuple(HOSTS[:2])
    with pytest.raises(SubmissionError, match=r"pipeline.devices: must be at most 1, got 2"):
        job_of(replace(job, placed=tuple(HOSTS[:2])), service(devices=["cpu:0"]))


@pytest.mark.parametrize(
    ("devices", "key", "told"),
    [
        (9, "pipeline.devices", "must be at most 4, got 9"),
        (0, "pipeline.devices.count", "must be an integer from 1 to 1024, got 0"),
        (True, "pipeline.devices", "or how many of any, as 2 or {count = 2}, got true"),
        ({"count": 2, "host": 1}, "pipeline.devices.host", "known keys of pipeline.devices: count, memory, hosts"),
        ({"count": 3, "hosts": 1}, "pipeline.devices.hosts", "must be more: so few hosts have no 3 devices"),
        ({"count": 4, "memory": "2 GiB"}, "memory", "must be less: too few devices of this service have as much"),
    ],
)
def test_what_can_never_be_placed_is_refused(devices, key, told):
    found = problems(changed("pipeline.devices", devices), LARGE)
    assert told in found.get(key, ""), found


def test_memory_is_said_once():
    both = changed("pipeline.devices", {"count": 2, "memory": "2 GiB"}) | {"memory": "1 GiB"}
    assert problems(both) == {"": "pipeline.devices.memory: is 2 GiB, and memory is 1 GiB; leave one out"}


@pytest.mark.parametrize(
    ("wrong", "key"),
    [({"weight": 0}, "weight"), ({"tags": ["a b"]}, "tags[0]"), ({"priority_class": "urgent"}, "prio")],
)
def test_an_amendment_is_checked_as_a_submission_is(wrong, key):
    good = {"weight": 2.0, "priority_class": "background", "tags": ["a", "a", "b"]}
    assert check_amendment(**good) == good | {"tags": ["a", "b"]}
    assert check_amendment(weight=None, tags=[]) == {"tags": []}
    with pytest.raises(SubmissionError, match=f"^{re.escape(key)}.*: must be "):
        check_amendment(**wrong)


def test_the_error_travels():
    error = SubmissionError([("training.steps", "must be more"), ("", "and 3 more")])
    again = pickle.loads(pickle.dumps(error))
    assert (again.problems, str(again)) == (error.problems, "training.steps: must be more\nand 3 more")


def test_the_operator_alone_says_where_figures_go(tmp_path):
    settings = SERVICE.model_copy(
        update={"folder": tmp_path, "tensorboard": True, "mlflow": SecretStr("http://me:secret@mlflow")}
    )
    made = record(check_submission(RIGHT, SERVICE, ENTRIES))
    assert "observe" in problems({**RIGHT, "observe": {"mlflow": "http://elsewhere"}})
    observe = job_of(made, settings).observe
    assert observe.tensorboard == tmp_path / "jobs" / made.id / "tensorboard"
    assert (observe.mlflow, observe.mlflow_experiment) == ("http://me:secret@mlflow", "asyncpipe")
    assert "secret" not in repr(settings)
    assert job_of(made, SERVICE).observe.tensorboard is None
