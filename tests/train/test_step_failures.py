"""Steps that fail: tried again without a trace, or the run's end, with the reason."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from resume_helpers import STEPS, make_job
from run_helpers import MICROBATCHES, Fault, Faulty, Told, assert_same_end, faulty_workload, with_nan
from torch import Generator, Tensor, nn

from asyncpipe.errors import HungTaskError, TaskError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train import step_failures as module
from asyncpipe.train.buffer_rollback import BufferRollback
from asyncpipe.train.job_file import Job
from asyncpipe.train.step_failures import NonFiniteLossError, OutOfMemoryError
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


def job_of(folder: Path, **faults: Any) -> Job:
    pipeline = {"checkpoint": "never", "balance": [3, 3], "microbatches": MICROBATCHES}
    job = make_job(folder, pipeline=pipeline, snapshots={"every": 99})
    return job.override("faults", **faults)


async def trained(job: Job, make: Callable[[], Workload], told: Told, *, pooled: bool = False) -> Any:
    if not pooled:
        return await TrainingRun(job, make, progress=told).run()
    async with DevicePool() as pool:
        return await TrainingRun(job, make, progress=told, pool=pool).run()


def lines(told: Told) -> list[str]:
    return [text for _, text in told.notes]


# Again


# For each step, from 0: micro-batches at which its attempts fail, in the backward if they are negative.
FAILURES: dict[str, dict[int, list[int]]] = {
    "the first task": {0: [0]},
    "a forward": {2: [3]},
    "a backward": {2: [-1]},
    "the last step": {STEPS - 1: [-3]},
    "two steps": {1: [2], 4: [-2]},
    "twice": {3: [1, -3]},
}


def hot(failures: dict[int, list[int]], kind: type[BaseException] = ArithmeticError) -> Faulty:
    return Faulty({step: [Fault(abs(at), kind("hot"), at < 0) for at in all_] for step, all_ in failures.items()})


async def train(folder: Path, faulty: Faulty, *, pooled: bool = False, **faults: Any) -> tuple[Any, Told]:
    told = Told(faulty=faulty)
    return await trained(job_of(folder, **faults), lambda: faulty_workload(faulty), told, pooled=pooled), told


@pytest.fixture
async def whole(tmp_path: Path) -> tuple[Path, list[float]]:
    """The last snapshot and the losses of a run in which nothing fails."""
    summary, told = await train(tmp_path / "whole", Faulty())
    assert told.notes == []
    return summary.snapshot, told.losses


@pytest.mark.parametrize(
    ("failure", "pooled"), [*((failure, False) for failure in FAILURES), ("a backward", True), ("twice", True)]
)
async def test_a_step_that_is_tried_again_leaves_no_trace(tmp_path, whole, caplog, failure, pooled):
    summary, told = await train(tmp_path / "other", hot(FAILURES[failure]), pooled=pooled, step_retries=2)
    assert told.losses == whole[1]
    assert_same_end(summary.snapshot, whole[0])
    assert len(told.notes) == len(caplog.records) == sum(map(len, FAILURES[failure].values()))
    level, text = told.notes[0]
    assert level == logging.WARNING
    assert "failed and it is tried again with the same batch (1 of 2): " in text
    assert "ArithmeticError: hot" in text
    assert caplog.records[0].getMessage() == f"job linear: {text}"


class Unruly:
    """Batches drawn where they should not be, the fourth of them only when ``open`` is set."""

    def __init__(self) -> None:
        self.open = Event()

    def __call__(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for number in range(99):
            assert number != 3 or self.open.wait(30)
            x = torch.rand(batch_size, 3, dtype=torch.float64)
            yield x, x.flip(1)


@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "on a pool"])
async def test_a_loader_that_draws_where_it_should_not_takes_its_turn_at_a_retry_too(tmp_path, pooled):
    class Opening(Told):
        def noted(self, level: int, text: str) -> None:
            super().noted(level, text)
            unruly.open.set()

    async def losses(folder: Path, faulty: Faulty) -> list[float]:
        told = Opening(faulty=faulty)

        def make() -> Workload:
            return replace(faulty_workload(faulty), batches=unruly)

        await trained(job_of(folder), make, told, pooled=pooled)
        return told.losses

    unruly = Unruly()
    # The third step fails while the fourth batch is being made.
    failed = await losses(tmp_path / "one", hot({2: [1], 4: [-1]}))
    assert failed == await losses(tmp_path / "two", Faulty())


async def failing(folder: Path, faulty: Faulty, kind: type[Exception] = TaskError, **faults: Any) -> tuple[Any, Told]:
    told = Told(faulty=faulty)
    with pytest.raises(kind) as caught:
        await trained(job_of(folder, **faults), lambda: faulty_workload(faulty), told)
    return caught.value, told


async def test_the_step_that_fails_too_often_ends_the_run_with_its_error(tmp_path):
    faulty = Faulty({2: [Fault(0, ArithmeticError("hot")), Fault(3, ArithmeticError("cold"))]})
    error, told = await failing(tmp_path, faulty, step_retries=1)
    assert str(error.__cause__) == "cold"
    assert (error.microbatch, error.stage) == (3, 1)
    assert len(told.losses) == 2
    assert lines(told) == [
        "step 3 failed and it is tried again with the same batch (1 of 1): F(0,1) failed (kind F, micro-batch 0, "
        "stage 1, device cpu:1): ArithmeticError: hot"
    ]


async def test_no_step_is_tried_again_where_the_job_says_so(tmp_path):
    error, told = await failing(tmp_path, hot({1: [0]}), step_retries=0)
    assert (str(error.__cause__), told.notes) == ("hot", [])


@pytest.mark.parametrize(
    "make", [lambda: HungTaskError("F(0,1)", "cpu:1", 61.0, 2.0), SystemExit], ids=["hung", "exit"]
)
async def test_what_is_no_ordinary_error_is_not_tried_again(tmp_path, make):
    error, told = await failing(tmp_path, Faulty({1: [Fault(0, make())]}), step_retries=5)
    assert type(error.__cause__) is type(make())
    assert (told.notes, len(told.losses)) == ([], 1)


async def test_a_run_goes_on_from_a_snapshot_after_a_failure_as_if_it_had_never_failed(tmp_path, whole):
    job = job_of(tmp_path / "other", step_retries=0).override("snapshots", every=2)
    faulty = hot({4: [0]})
    told, again = Told(faulty=faulty), Told()
    with pytest.raises(TaskError):
        await trained(job, lambda: faulty_workload(faulty), told)
    summary = await trained(job, lambda: faulty_workload(Faulty()), again)
    begun = STEPS - len(again.losses)
    assert begun in (2, 4)
    assert told.losses[:begun] + again.losses == whole[1]
    assert_same_end(summary.snapshot, whole[0])


# Out of memory


def explain(error: TaskError, pipe: Any) -> str | None:
    assert len(pipe.stages) == 2
    return f"stage {error.stage} is full; halve it" if isinstance(error.__cause__, torch.OutOfMemoryError) else None


async def test_a_device_that_stays_out_of_memory_is_tried_once_more_and_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "explain_out_of_memory", explain)
    faulty = hot({1: [0, 0, 0]}, torch.OutOfMemoryError)
    error, told = await failing(tmp_path, faulty, OutOfMemoryError, step_retries=5)
    assert str(error) == "step 2: stage 1 is full; halve it"
    assert isinstance(error.__cause__, TaskError)
    assert isinstance(error.__cause__.__cause__, torch.OutOfMemoryError)
    assert [level for level, _ in told.notes] == [logging.ERROR, logging.WARNING, logging.ERROR]
    assert told.notes[0][1] == told.notes[2][1] == "stage 1 is full; halve it"
    assert "(1 of 1)" in told.notes[1][1]


async def test_memory_that_is_there_again_is_enough(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(module, "explain_out_of_memory", explain)
    summary, told = await train(tmp_path / "other", hot({3: [-2]}, torch.OutOfMemoryError))
    assert told.losses == whole[1]
    assert_same_end(summary.snapshot, whole[0])


# No numbers


def nan_workload(*bad: int) -> Workload:
    return replace(faulty_workload(Faulty()), batches=with_nan(*bad))


async def test_a_loss_that_is_no_number_ends_the_run_before_the_weights_are_touched(tmp_path):
    weights: list[dict[str, Tensor]] = []
    built: list[nn.Module] = []

    def make() -> Workload:
        workload = nan_workload(2)
        built.append(workload.model)
        return workload

    def on_step(_: int) -> None:
        weights.append({name: value.clone() for name, value in built[0].named_parameters()})

    told = Told(on_step)
    message = (
        r"^step 3: the loss is nan and the gradient norm nan; the weights are as they were before it; a learning rate "
        r'below 0\.0\d+, .*non_finite = "skip"'
    )
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        await TrainingRun(job_of(tmp_path), make, progress=told).run()
    assert caught.value.step == 3
    assert len(told.losses) == 2
    for name, value in built[0].named_parameters():
        assert torch.equal(value, weights[1][name])
        assert value.grad is None
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.step) == (str(caught.value), 3)


@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "on a pool"])
async def test_updates_that_are_skipped_are_noted_and_counted_and_the_weights_stay(tmp_path, caplog, pooled):
    states: list[dict[str, Tensor]] = []
    workload = nan_workload(1, 2, 4)

    def on_step(_: int) -> None:
        states.append({name: value.clone() for name, value in workload.model.state_dict().items()})

    told = Told(on_step)
    summary = await trained(job_of(tmp_path, non_finite="skip"), lambda: workload, told, pooled=pooled)
    assert told.skipped == [False, True, True, False, True, False]
    assert (summary.steps, summary.skipped) == (6, 3)
    finite = [loss for loss, skipped in zip(told.losses, told.skipped, strict=True) if not skipped]
    assert summary.loss == pytest.approx(sum(finite) / 3)
    for step in (1, 2, 4):
        for name, value in states[step].items():
            assert torch.equal(value, states[step - 1][name]), name
    assert lines(told) == [
        f"step {step}: the loss is nan and the gradient norm nan; the weights are not updated ({row}, at most 10)"
        for step, row in ((2, "1 in a row"), (3, "2 in a row"), (5, "1 in a row"))
    ]
    assert len(caplog.records) == 3


async def test_too_many_skipped_updates_in_a_row_end_the_run_also_over_a_snapshot(tmp_path, caplog):
    job = job_of(tmp_path / "one", non_finite="skip", most_skipped=2)
    message = "step 5: .*, after 2 skipped updates in a row; the weights are"
    with pytest.raises(NonFiniteLossError, match=message):
        await trained(job, lambda: nan_workload(0, 2, 3, 4), Told())

    job = job_of(tmp_path / "two", non_finite="skip", most_skipped=2)
    told = Told(lambda step: step == 4 and run.orders.stop())
    run = TrainingRun(job, lambda: nan_workload(0, 2, 3, 4), progress=told)
    assert (await run.run()).skipped == 3
    with pytest.raises(NonFiniteLossError, match=message):
        await trained(job, lambda: nan_workload(0, 2, 3, 4), Told())


async def test_a_job_may_ignore_what_is_no_number(tmp_path, caplog):
    told = Told()
    workload = nan_workload(1)
    summary = await trained(job_of(tmp_path, non_finite="ignore"), lambda: workload, told)
    assert summary.steps == STEPS
    assert (told.skipped, told.notes, summary.skipped) == ([False] * 6, [], 0)
    assert all(value.isnan().all() for name, value in workload.model.named_parameters() if name == "5.weight")


# Buffers


class Odd(nn.Module):
    """Buffers of all kinds: one that changes, one that does not, one that is replaced, one that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(2))
        self.register_buffer("table", torch.ones(1000))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("none", None)
        self.register_buffer("table_again", self.table)

    def change(self) -> None:
        self.sum += 1
        self.count = self.count + 1


def test_buffers_are_put_back_and_only_those_that_change_are_copied():
    model = nn.Sequential(Odd(), Odd())
    buffers = BufferRollback(model)
    for done in range(3):
        buffers.save()
        for _ in range(2):  # A step may fail twice.
            model[0].change(), model[1].change()
            assert buffers.restore()
            assert [float(odd.sum[0]) + float(odd.count) for odd in model] == [2 * done] * 2
        model[0].change(), model[1].change()
    assert buffers.copied == ["sum", "sum"]


def test_a_buffer_that_never_changed_before_cannot_be_put_back_and_nothing_is():
    model = Odd()
    buffers = BufferRollback(model)
    buffers.save()
    model.change()
    buffers.save()
    model.change()
    model.table += 1
    assert not buffers.restore()
    assert (float(model.sum[0]), float(model.count)) == (2, 2)
