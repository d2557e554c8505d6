"""``loss.backward()`` runs its task graph: last micro-batch first, early recomputation, devices in parallel."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from dropin_helpers import parts
from torch import nn

from asyncpipe import Costs, Pipeline
from asyncpipe.core.engine.events import GateOpened, StepSubmitted
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.report import report
from asyncpipe.ops.autograd import caller_graph
from asyncpipe.pipeline.call_backward import CallBackward
from asyncpipe.testing import EmulatedExecutor, InlineExecutor

COSTS = Costs(forward=0.004, backward=0.004, recompute=0.004, copy=0.001)

# The backward half of Figure 2 of the torchgpipe paper (arXiv 2004.09910): 4 micro-batches, 3 stages, recomputation of
# all but the last. A line is a task and what it waits for. B(i,2) also waits for the caller's gradient: its gate.
FIGURE_2 = """
B(3,2)
R(2,2)    B(3,2)
B(2,2)    B(3,2)  R(2,2)
R(1,2)    B(2,2)
B(1,2)    B(2,2)  R(1,2)
R(0,2)    B(1,2)
B(0,2)    B(1,2)  R(0,2)

C(3,2>1)  B(3,2)
C(2,2>1)  B(2,2)
C(1,2>1)  B(1,2)
C(0,2>1)  B(0,2)

B(3,1)    C(3,2>1)
R(2,1)    B(3,1)
B(2,1)    B(3,1)  R(2,1)  C(2,2>1)
R(1,1)    B(2,1)
B(1,1)    B(2,1)  R(1,1)  C(1,2>1)
R(0,1)    B(1,1)
B(0,1)    B(1,1)  R(0,1)  C(0,2>1)

C(3,1>0)  B(3,1)
C(2,1>0)  B(2,1)
C(1,1>0)  B(1,1)
C(0,1>0)  B(0,1)

B(3,0)    C(3,1>0)
R(2,0)    B(3,0)
B(2,0)    B(3,0)  R(2,0)  C(2,1>0)
R(1,0)    B(2,0)
B(1,0)    B(2,0)  R(1,0)  C(1,1>0)
R(0,0)    B(1,0)
B(0,0)    B(1,0)  R(0,0)  C(0,1>0)
"""


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
def test_the_backward_is_that_of_figure_2(workload, released, executors):
    model, records = workload.model(), Records()
    with pipeline(model, executors=executors, observers=[records]).sync() as pipe:
        nn.functional.mse_loss(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10
    assert released == [3, 2, 1, 0]
    record = records.of[Phase.BACKWARD]
    graph = record.graph
    lines = [line.split() for line in FIGURE_2.splitlines() if line]
    assert sorted(task.id for task in graph.tasks) == sorted(line[0] for line in lines)
    edges = sorted((graph.tasks[edge.dependency].id, graph.tasks[edge.task].id) for edge in graph.edges())
    assert edges == sorted((dependency, line[0]) for line in lines for dependency in line[1:])
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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_gradients_are_those_of_the_same_tasks_one_by_one(workload, schedule):
    made = {}
    for executors in (None, InlineExecutor, emulated):
        model = workload.model(dropout=0.5)
        with pipeline(
            model, 2, stages=4 if schedule == "interleaved" else 2, schedule=schedule, executors=executors
        ).sync() as pipe:
            torch.manual_seed(1)
            nn.functional.mse_loss(pipe(workload.x), workload.target).backward()
        made[executors] = [p.grad for p in model.parameters()]
    for other in (InlineExecutor, emulated):
        assert all(torch.equal(a, b) for a, b in zip(made[None], made[other], strict=True))


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


def test_without_the_chain_the_order_is_the_engines(workload, released, monkeypatch):
    """Shows that the test above can fail: here the exits are not chained."""
    entry, edges = caller_graph._PipelineEntry, []  # Private: only the function itself tells its own edge.

    class Entry:
        @staticmethod
        def apply(*args):
            edges.append(entry.apply(*args))
            return edges[-1]

    monkeypatch.setattr(caller_graph, "_PipelineEntry", Entry)
    monkeypatch.setattr(caller_graph, "fork", lambda tensor: (tensor, edges[-1]))
    count_high()
    with pipeline(workload.model()).sync() as pipe:
        first_micro_batch_first(pipe(parts(workload))).backward()
    assert sorted(released) == [0, 1, 2, 3]
    assert released[0] == 0


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


# Time


def test_recomputation_overlaps_the_copy_of_the_gradient(workload, before_task):
    """The copy of a gradient waits until the recomputation has begun: without overlap, this would hang."""
    begun = {(i, j): threading.Event() for i in range(3) for j in range(3)}

    def hook(task):
        if task.kind == "R":
            begun[task.microbatch, task.stage].set()
        if task.is_gradient_copy and task.microbatch < 3:
            assert begun[task.microbatch, task.stage].wait(30)

    before_task(hook)
    records = Records()
    costs = Costs(forward=0.0, backward=0.005, recompute=0.005, copy=0.05)
    with pipeline(
        workload.model(), executors=lambda device: EmulatedExecutor(device, costs), observers=[records]
    ).sync() as pipe:
        pipe(workload.x).sum().backward()
    times = {time.task.id: time for time in report(records.of[Phase.BACKWARD]).tasks}
    for i, j in itertools.product(range(3), range(2)):
        recomputation, copy = times[f"R({i},{j})"], times[f"C({i},{j + 1}>{j})"]
        assert recomputation.start < copy.end <= times[f"B({i},{j})"].start


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_both_devices_work_at_the_same_time(workload, before_task, checkpoint):
    """Two forwards meet at a barrier, and so do two backwards; the journal shows the overlap."""
    forward, backward = threading.Barrier(2), threading.Barrier(2)

    def hook(task):
        if task.id in ("F(1,0)", "F(0,1)"):
            forward.wait(30)
        if task.id in ("B(1,1)", "B(2,0)"):
            backward.wait(30)

    before_task(hook)
    model, records = workload.model(), Records()
    with pipeline(model, 2, checkpoint=checkpoint, executors=emulated, observers=[records]).sync() as pipe:
        nn.functional.mse_loss(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10
    for phase, pair in ((Phase.FORWARD, ("F(1,0)", "F(0,1)")), (Phase.BACKWARD, ("B(1,1)", "B(2,0)"))):
        times = {time.task.id: time for time in report(records.of[phase]).tasks}
        one, other = (times[name] for name in pair)
        assert max(one.start, other.start) < min(one.end, other.end)
