"""``loss.backward()`` runs its task graph: last micro-batch first, early recomputation, devices in parallel."""

from __future__ import annotations

import threading

import pytest
import torch
from dropin_helpers import parts
from torch import nn

from asyncpipe import Costs, Pipeline
from asyncpipe.core.engine.events import GateOpened, StepSubmitted
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.report import report
from asyncpipe.pipeline.call_backward import CallBackward
from asyncpipe.testing import EmulatedExecutor, InlineExecutor

COSTS = Costs(forward=0.004, backward=0.004, recompute=0.004, copy=0.001)


class Records:
    """An observer that keeps the last record of each phase."""

    def __init__(self):
        self.of = {}

    def step_completed(self, record):
        self.of[record.graph.phase] = record


def emulated(device):
    return EmulatedExecutor(device, COSTS)


def pipeline(model, devices=3, **options):
    options = {"microbatches": 4, "schedule": "gpipe", "checkpoint": "except_last"} | options
    return Pipeline(model, [f"cpu:{k}" for k in range(devices)], **options)


@pytest.fixture
def released(monkeypatch):
    """The micro-batches of the calls of ``release``, in order."""
    seen = []
    release = CallBackward.release

    def noting(self, microbatch, gradients, *, retain):
        seen.append(microbatch)
        release(self, microbatch, gradients, retain=retain)

    monkeypatch.setattr(CallBackward, "release", noting)
    return seen


@pytest.mark.parametrize("executors", [None, InlineExecutor, emulated], ids=["threads", "inline", "emulated"])
def test_the_backward_runs_its_graph_last_micro_batch_first(workload, released, executors):
    model, records = workload.model(), Records()
    with pipeline(model, executors=executors, observers=[records]).sync() as pipe:
        nn.functional.mse_loss(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10
    assert released == [3, 2, 1, 0]
    record = records.of[Phase.BACKWARD]
    graph = record.graph
    assert [graph.tasks[gated].id for gated in graph.gates] == ["B(0,2)", "B(1,2)", "B(2,2)", "B(3,2)"]
    events = [event for _, event in record.journal if isinstance(event, StepSubmitted | GateOpened)]
    assert isinstance(events[0], StepSubmitted)
    assert [event.gate for event in events[1:]] == [3, 2, 1, 0]
    assert_in_time(record)


def assert_in_time(record):
    """Every task of the record began when what it depends on had ended, and each stage's backwards ran in order."""
    graph, times = record.graph, {time.task.number: time for time in report(record).tasks}
    assert len(times) == len(graph.tasks)
    assert all(times[edge.dependency].end <= times[edge.task].start for edge in graph.edges())
    opened = {event.gate: at for at, event in record.journal if isinstance(event, GateOpened)}
    origin = next(at for at, event in record.journal if isinstance(event, StepSubmitted))
    assert all(times[gated].start >= opened[i] - origin for i, gated in enumerate(graph.gates))
    for stage in range(graph.shape.stages):
        backwards = [time.task for time in times.values() if (time.task.kind, time.task.stage) == ("B", stage)]
        backwards.sort(key=lambda task: times[task.number].start)
        assert [task.microbatch for task in backwards] == [3, 2, 1, 0]


# The order of the engine


def first_micro_batch_first(outputs):
    """A loss for which the engine's own order begins with micro-batch 0.

    It takes the node with the highest sequence number first, and a new thread counts from zero. What a new thread
    made of the other outputs comes last, behind the exits, which this thread made.
    """
    made = []
    thread = threading.Thread(target=lambda: made.append(sum(output.square().sum() for output in outputs[1:])))
    thread.start()
    thread.join()
    return made[0] + outputs[0].square().sum()


def count_high():
    """Let this thread's sequence numbers be higher than those of a new thread will be."""
    for _ in range(200):
        torch.ones((), requires_grad=True) * 1.0


def test_the_chain_enforces_the_order(workload, released):
    model, bare = workload.model(), workload.model()
    count_high()
    first_micro_batch_first([bare(part) for part in workload.x.split(3)]).backward()
    with pipeline(model).sync() as pipe:
        first_micro_batch_first(pipe(parts(workload))).backward()
    assert released == [3, 2, 1, 0]
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-10


def test_a_backward_begins_before_the_engine_has_brought_the_other_gradients(workload, before_task):
    """Hooks of the outputs wait for tasks: if ``release`` blocked or came late, this would hang."""
    begun = {(kind, i): threading.Event() for kind in "RB" for i in range(4)}

    def note(task):
        if task.stage == 2 and (task.kind, task.microbatch) in begun:
            begun[task.kind, task.microbatch].set()

    def wait(i):
        def hook(_):
            assert begun["B", i + 1].wait(30)
            assert begun["R", i].wait(30)
            assert not begun["B", i].is_set()
            passed.append(i)

        return hook

    passed = []
    before_task(note)
    model = workload.model()
    with pipeline(model).sync() as pipe:
        outputs = pipe(parts(workload))
        for i in range(3):
            outputs[i].register_hook(wait(i))
        nn.functional.mse_loss(torch.cat(outputs), workload.target).backward()
    assert passed == [2, 1, 0]
    assert workload.worst(model) < 1e-10


@pytest.mark.parametrize("used", [[0], [2], [1, 3], [3]])
def test_gates_open_in_order_where_only_some_outputs_have_gradients(workload, used):
    records = Records()
    with pipeline(workload.model(), observers=[records]).sync() as pipe:
        outputs = pipe(parts(workload))
        sum(outputs[i].sum() for i in used).backward()
    record = records.of[Phase.BACKWARD]
    assert [event.gate for _, event in record.journal if isinstance(event, GateOpened)] == [3, 2, 1, 0]
    assert_in_time(record)
