"""Which devices a job goes on with, and which models are not split anew, since bits could differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resume_helpers import make_chain, make_job
from torch import nn

from asyncpipe import pop, skippable, stash
from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.train.job_file import Job
from asyncpipe.train.other_devices import NotSplit, StepCosts, moved, split_anew

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def job_of(**pipeline: object) -> Job:
    return make_job(pipeline={"devices": FOUR, **pipeline})


def costs_of(job: Job, *, draws: bool = False, outcome: Outcome = Outcome.OK) -> StepCosts:
    table = job.pipeline
    shape = Shape(len(table.devices), table.microbatches, len(table.devices))
    graph = lower(
        find_schedule(table.schedule), shape, checkpoint=CheckpointMode.ALWAYS, wiring=Wiring.chain(shape.stages)
    )
    record = simulate(graph, lambda task: 1.0)
    costs = StepCosts(balance=table.balance)
    costs.step_completed(replace(record, outcome=outcome, notes=StepNotes(drew={1} if draws else set())))
    return costs


@pytest.mark.parametrize(
    ("gone", "others", "wanted"),
    [
        ({"cpu:1"}, (), ("cpu:0", "cpu:0", "cpu:2", "cpu:3")),
        ({"cpu:0", "cpu:1"}, (), ("cpu:2", "cpu:3", "cpu:2", "cpu:3")),
        ({"cpu:3"}, ("cpu:0", "cpu:4"), ("cpu:0", "cpu:1", "cpu:2", "cpu:4")),
        (set(FOUR), ("cpu:4",), ("cpu:4",) * 4),
    ],
)
def test_stages_of_lost_devices_go_where_there_are_fewest(gone, others, wanted):
    assert moved(job_of(), gone, others).pipeline.devices == wanted


def test_nothing_is_moved_to_nowhere():
    with pytest.raises(NotSplit, match="no device is left"):
        moved(job_of(), set(FOUR), ["cpu:0"])


def split(job: Job, model: object, costs: StepCosts | None = None) -> Job:
    return split_anew(job, model, {"cpu:1"}, costs or costs_of(job), find_schedule(job.pipeline.schedule))


def test_a_job_is_split_anew_over_what_is_left():
    job = split(job_of(), make_chain(tied=False)().model)
    assert job.pipeline.devices == ("cpu:0", "cpu:2", "cpu:3")
    assert sum(job.pipeline.balance) == 6
    again = split_anew(
        job, make_chain(tied=False)().model, {"cpu:0", "cpu:2"}, costs_of(job), find_schedule(job.pipeline.schedule)
    )
    assert (again.pipeline.devices, again.pipeline.balance) == (("cpu:3",), (6,))


@skippable(stash=["a"])
class _Down(nn.Linear):
    def forward(self, x):
        yield stash("a", x)
        return super().forward(x)


@skippable(pop=["a"])
class _Up(nn.Linear):
    def forward(self, x):
        return super().forward(x) + (yield pop("a"))


LINEAR = [nn.Linear(3, 3) for _ in range(6)]


@pytest.mark.promise(
    "A lost worker", "The model is split again only if results stay bit-identical; otherwise whole stages move."
)
@pytest.mark.parametrize(
    ("model", "options", "draws", "reason"),
    [
        (make_chain(tied=True)().model, {}, False, "layers share parameters"),
        ([_Down(3, 3), *LINEAR, _Up(3, 3)], {}, False, "values skip layers"),
        (nn.Linear(3, 3), {}, False, r"no mere sequence of layers \(Linear\)"),
        (LINEAR, {}, True, "its stages draw random numbers"),
        (LINEAR, {"stages": 4}, False, "it asks for 4 stages"),
        (LINEAR, {"schedule": "backward-first"}, False, "adds gradients in an order that follows from the stages"),
        (LINEAR[:4], {"schedule": "zbv"}, False, "no schedule serves 3 devices and 4 layers"),
    ],
    ids=["ties", "skips", "one module", "draws", "stages", "a rule", "a shape that does not work"],
)
def test_a_job_that_could_get_other_bits_is_not_split_anew(model, options, draws, reason):
    job = job_of(**options)
    costs = costs_of(job_of(), draws=draws) if "zbv" in options.values() else costs_of(job, draws=draws)
    with pytest.raises(NotSplit, match=reason):
        split(job, model, costs)


def test_only_steps_that_were_completed_count():
    with pytest.raises(NotSplit, match="no step of it was measured"):
        split(job_of(), LINEAR, costs_of(job_of(), outcome=Outcome.FAILED))
