"""``overlap = true``: the losses and weights of steps one by one, whatever comes between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from pydantic import ValidationError
from resume_helpers import STEPS, batches, disturb, make_chain, make_job
from run_helpers import LOADED, Fault, Faulty, Told, assert_same_end, beside_others, faulty_workload, plain, with_nan
from torch import Generator, Tensor

from asyncpipe.errors import TaskError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.steps import StepRun
from asyncpipe.train.batches import DataError
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import StepProgress, TrainingSummary
from asyncpipe.train.step_failures import NonFiniteLossError, OutOfMemoryError
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = pytest.mark.usefixtures("no_leaks", "snapshot_each_step")

OVERLAP = {"overlap": True, "clip": 0.5, "warmup_steps": 3}
FAULTS = {"step_retries": 0}


def job_of(folder: Path, *, every: int = 99, faults: dict[str, Any] | None = None, **changed: Any) -> Job:
    pipeline, training = changed.pop("pipeline", {}), {**OVERLAP, **changed}
    snapshots = {"every": every}
    return make_job(
        folder, pipeline=pipeline, training=training, snapshots=snapshots, faults={**FAULTS, **(faults or {})}
    )


class Figures(Told):
    """Keeps learning rates and norms as well."""

    def __init__(self, on_step: Callable[[int], object] = lambda step: None) -> None:
        super().__init__(on_step)
        self.rates: list[float] = []
        self.norms: list[float] = []

    def stepped(self, progress: StepProgress) -> None:
        self.rates.append(progress.learning_rate)
        self.norms.append(progress.gradient_norm)
        assert progress.seconds > 0
        super().stepped(progress)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each step that ``Pipeline.steps`` has begun: how many before it were not read then."""
    counts: list[int] = []
    start = StepRun.start

    def counting(self: StepRun, step: PreparedStep) -> None:
        counts.append(len(self.under_way))
        start(self, step)

    monkeypatch.setattr(StepRun, "start", counting)
    return counts


async def run(job: Job, make: Callable[[], Workload] = plain, told: Told | None = None) -> TrainingSummary:
    disturb()
    return await TrainingRun(job, make, progress=told or Told()).run()


async def one_by_one(folder: Path, make: Callable[[], Workload] = plain, **pipeline: Any) -> tuple[Path, Figures]:
    told = Figures()
    summary = await run(job_of(folder, overlap=False, pipeline=pipeline), make, told)
    assert len(set(told.losses)) == STEPS
    assert summary.snapshot is not None
    return summary.snapshot, told


@pytest.mark.promise(
    "Bit-identical results",
    "A job with `overlap = true` is bit-identical to one without, also after a resume and beside other jobs.",
)
@pytest.mark.parametrize(
    ("kind", "every", "schedule"),
    [*((kind, 99, "1f1b") for kind in LOADED), ("plain", 2, "gpipe"), ("with a state of its own", 2, "zb-h2")],
)
async def test_the_bits_of_steps_one_by_one(tmp_path, behind, kind, every, schedule):
    whole, told = await one_by_one(tmp_path / "one", LOADED[kind], schedule=schedule)
    disturb()
    overlapping = Figures()
    job = job_of(tmp_path / "other", every=every, pipeline={"schedule": schedule})
    summary = await TrainingRun(job, LOADED[kind], progress=overlapping).run()
    assert overlapping.losses == told.losses
    assert overlapping.rates == told.rates
    assert overlapping.norms == pytest.approx(told.norms, rel=1e-12)
    assert overlapping.notes == []
    # The first step of the run, and the first behind each snapshot, begin behind nothing.
    assert behind == [int(step % every > 0) for step in range(STEPS)]
    assert summary.snapshot is not None
    assert_same_end(summary.snapshot, whole)


@pytest.mark.promise(
    "Bit-identical results",
    "A job with `overlap = true` is bit-identical to one without, also after a resume and beside other jobs.",
)
@pytest.mark.parametrize("then", [True, False], ids=["overlap", "one by one"])
@pytest.mark.parametrize("first", [True, False], ids=["overlap", "one by one"])
async def test_a_run_goes_on_from_a_snapshot_in_either_way(tmp_path, first, then):
    whole, told = await one_by_one(tmp_path / "one")
    await run(job_of(tmp_path / "parts", every=1, overlap=first))
    for step in range(1, STEPS):
        folder = tmp_path / f"from-{step}"
        folder.mkdir()
        copytree(tmp_path / "parts" / f"step-{step}", folder / f"step-{step}")
        again = Told()
        summary = await run(job_of(folder, overlap=then), plain, again)
        assert again.losses == told.losses[step:]
        assert summary.snapshot is not None
        assert_same_end(summary.snapshot, whole)


@pytest.mark.parametrize("end", ["stop", "cancel"])
async def test_a_run_that_ends_early_goes_on_to_the_same_bits(tmp_path, end):
    whole, told = await one_by_one(tmp_path / "one")

    def on_step(step: int) -> None:
        if step == 3:
            first.orders.stop() if end == "stop" else running.cancel()

    disturb()
    parts = Told(on_step)
    first = TrainingRun(job_of(tmp_path / "parts", every=2), plain, progress=parts)
    running = asyncio.ensure_future(first.run())
    await asyncio.wait([running])
    assert running.cancelled() == (end == "cancel")
    again = Told()
    summary = await run(job_of(tmp_path / "parts"), plain, again)
    # The step that had begun behind the third is done as well, and in the snapshot at the end.
    kept = 4 if end == "stop" else 2
    assert parts.losses == told.losses[: 4 if end == "stop" else 3]
    assert again.losses == told.losses[kept:]
    assert summary.snapshot is not None
    assert_same_end(summary.snapshot, whole)


async def test_another_schedule_waits_for_the_steps_that_have_begun(tmp_path):
    asked: list[asyncio.Future[None]] = []

    def on_step(step: int) -> None:
        if step == 2:
            asked.append(asyncio.ensure_future(changing.orders.change_schedule("gpipe")))

    told = Told(on_step)
    changing = TrainingRun(job_of(tmp_path), plain, progress=told)
    summary = await changing.run()
    await asked[0]
    ((_, text),) = told.notes
    assert text in [f"the schedule is gpipe from step {step} on" for step in (4, 5)]
    assert (summary.steps, len(told.losses)) == (STEPS, STEPS)
    assert changing.job.pipeline.schedule == "gpipe"


# What ends a run


@pytest.mark.promise("Killed and resumed", "No snapshot is taken after a loss or gradients that are not finite.")
async def test_a_loss_that_is_not_finite_ends_the_run_and_is_in_no_snapshot(tmp_path):
    _, whole = await one_by_one(tmp_path / "one")
    told = Told()
    message = (
        "^step 4: the loss is nan and the gradient norm nan; the weights are updated with it, since steps overlap: go "
        "on from the last snapshot; .* overlap = false leaves"
    )
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        await run(job_of(tmp_path / "nan", every=1), lambda: replace(plain(), batches=with_nan(3)), told)
    assert caught.value.step == 4
    assert told.losses == whole.losses[:3]
    assert [step for step, _ in told.snapshots] == [1, 2, 3]
    again = Told()
    await run(job_of(tmp_path / "nan"), plain, again)
    assert again.losses == whole.losses[3:]


@pytest.mark.parametrize("overlap", [False, True])
async def test_gradients_that_are_not_finite_count_where_the_loss_is(tmp_path, overlap):
    def root_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * 0).abs().sqrt().sum()  # At 0 the root is 0 and its slope is infinite.

    for non_finite in ("fail", "ignore"):
        job = job_of(tmp_path / non_finite, every=1, overlap=overlap, faults={"non_finite": non_finite})
        running = run(job, lambda: replace(plain(), loss_fn=root_loss))
        if non_finite == "ignore":
            assert (await running).steps == STEPS
            continue
        with pytest.raises(NonFiniteLossError, match="step 1: the loss is 0 and the gradient norm nan"):
            await running
        assert list(job.snapshots.folder.iterdir()) == []


@pytest.mark.parametrize("backward", [False, True])
async def test_a_failed_task_ends_the_run_behind_the_steps_before_it(tmp_path, backward):
    """A step is not repeated: some stages have made its update."""
    options = {"checkpoint": "never", "balance": [3, 3]}
    _, whole = await one_by_one(tmp_path / "one", lambda: faulty_workload(Faulty()), **options)
    faulty = Faulty({0: [Fault(3 * 4 + 1, ArithmeticError("hot"), backward)]})  # In the fourth step's second forward.
    told = Told()
    with pytest.raises(TaskError, match="hot"):
        await run(job_of(tmp_path / "hot", every=2, pipeline=options), lambda: faulty_workload(faulty), told)
    assert told.losses == whole.losses[:3]
    assert told.notes == []
    again = Told()
    await run(job_of(tmp_path / "hot", pipeline=options), lambda: faulty_workload(Faulty()), again)
    assert again.losses == whole.losses[2:]


async def test_a_lack_of_memory_is_explained(tmp_path):
    lack = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    faulty, told = Faulty({0: [Fault(4, lack)]}), Told()
    options = {"checkpoint": "never", "balance": [3, 3]}
    with pytest.raises(OutOfMemoryError, match=r"^step 2: "):
        await run(job_of(tmp_path, pipeline=options), lambda: faulty_workload(faulty), told)
    assert (len(told.losses), len(told.notes)) == (1, 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_batches_that_end_or_fail(tmp_path, fails, overlap):
    def four(batch_size: int, generator: Generator) -> Iterator[Batch]:
        for number, batch in enumerate(batches(batch_size, generator)):
            if number == 4:
                if fails:
                    raise OSError("a cable")
                return
            yield batch

    told = Told()
    running = run(job_of(tmp_path, overlap=overlap), lambda: replace(plain(), batches=four), told)
    if fails:
        with pytest.raises(DataError, match="after 4 batches"):
            await running
    else:
        summary = await running
        assert (summary.steps, summary.stopped) == (4, False)
        assert summary.snapshot == tmp_path / "step-4"
    assert len(told.losses) == 4


# What the setting needs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"faults": {"step_retries": 1}}, r"some stages updated and is not retried: set faults.step_retries = 0; or"),
        ({"faults": {"non_finite": "skip"}}, 'set faults.non_finite = "fail" or "ignore"; or overlap = false'),
    ],
    ids=str,
)
def test_what_cannot_be_decided_between_two_steps_is_refused(tmp_path, changed, message):
    with pytest.raises(ValidationError, match=message):
        job_of(tmp_path, **changed)
    assert not job_of(tmp_path, overlap=False, **changed).training.overlap


@pytest.mark.parametrize(
    ("make", "pipeline", "reason"),
    [
        (plain, {"order": "hint"}, "the schedule decides as it goes what comes next"),
        (make_chain(tied=True), {"balance": [3, 3]}, "stages on several devices share parameters or buffers"),
    ],
    ids=["hint", "ties"],
)
async def test_where_steps_cannot_overlap_they_run_one_by_one_and_the_run_says_so(tmp_path, make, pipeline, reason):
    one, other = Told(), Told()
    whole = await run(job_of(tmp_path / "one", overlap=False, pipeline=pipeline), make, one)
    summary = await run(job_of(tmp_path / "other", pipeline=pipeline), make, other)
    assert other.notes == [(logging.INFO, f"training.overlap: steps run one by one: {reason}")]
    if pipeline.get("order") == "hint":
        return  # Sums are rounded as tasks happen to end.
    assert other.losses == one.losses
    assert whole.snapshot is not None
    assert summary.snapshot is not None
    assert_same_end(summary.snapshot, whole.snapshot)


@pytest.mark.parametrize("named", [False, True])
async def test_on_a_pool(tmp_path, named):
    whole, one = await one_by_one(tmp_path / "one")
    told = Told()
    job = job_of(tmp_path / "other")
    disturb()
    if named:
        summary = await beside_others(job, plain, told, tmp_path)
    else:
        async with DevicePool() as pool:
            summary = await TrainingRun(job, plain, progress=told, pool=pool).run()
    assert told.notes == []
    assert told.losses == one.losses
    assert_same_end(summary.snapshot, whole)
