"""A forked child of a process with an open pipeline: nothing in it waits for threads that it does not have."""

from __future__ import annotations

import asyncio
import copy
import gc
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from forking import in_child, raised_by
from torch import nn
from torch.utils.data import DataLoader, Dataset

from asyncpipe import DevicePool, Pipeline
from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime import portal

mse = nn.functional.mse_loss
REFUSED = "PipelineClosedError: the pipeline was opened by process"
# Since Python 3.12 os.fork warns where there are threads, which is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def pipeline(model, pool=None, **options):
    return Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse, pool=pool, **options)


@pytest.mark.promise("Your own program", "In a forked child, every use of the parent's pipeline is refused at once.")
def test_every_use_is_refused_at_once(workload, no_leaks):
    """Forward, step and backward raise, also that of an output of the parent; closing returns."""
    with pipeline(workload.model()).sync() as pipe:
        loss = mse(pipe(workload.x), workload.target)

        def child():
            raised = [
                raised_by(lambda: pipe(workload.x)),
                raised_by(lambda: pipe.step(workload.x, workload.target)),
                raised_by(loss.backward),
                raised_by(lambda: asyncio.run(pipe._pipeline.step(workload.x, workload.target))),
                raised_by(lambda: asyncio.run(pipe._pipeline.aclose())),
                raised_by(pipe.close),
                raised_by(lambda: pipe.__exit__(None, None, None)),
            ]
            return raised, [p.grad for p in pipe.parameters()]

        raised, gradients = in_child(child)
        for refused in raised[:4]:
            assert refused.startswith(REFUSED)
            assert "copy.deepcopy(pipeline)" in refused
        assert raised[4:] == ["", "", ""]
        assert gradients == [None] * len(gradients)
        loss.backward()
        assert workload.worst(pipe.module) < 1e-10


async def test_a_pipeline_on_the_running_loop(workload, no_leaks):
    async with DevicePool() as pool, pipeline(workload.model(), pool) as pipe:
        await pipe.step(workload.x, workload.target)

        def child():
            return [
                raised_by(partial(asyncio.run, step))
                for step in (
                    pipe.step(workload.x, workload.target),
                    pipeline(workload.model(), pool).__aenter__(),
                    pipe.aclose(),
                    pool.aclose(),
                )
            ]

        step, another, *closed = in_child(child)
        assert step.startswith(REFUSED)
        assert another.startswith(REFUSED)
        assert closed == ["", ""]
        pipe.module.zero_grad()
        await pipe.step(workload.x, workload.target)
        assert workload.worst(pipe.module) < 1e-10


@pytest.mark.promise("Your own program", "In a forked child, every use of the parent's pipeline is refused at once.")
def test_forked_while_another_thread_steps(workload, before_task, no_leaks):
    """The child inherits locks that no thread of its own will release."""
    running, forked = threading.Event(), threading.Event()

    def hold(task):
        if task.id == "F(1,1)":
            running.set()
            assert forked.wait(30)

    before_task(hold)
    with pipeline(workload.model()).sync() as pipe:
        thread = threading.Thread(target=pipe.step, args=(workload.x, workload.target))
        thread.start()
        assert running.wait(30)
        try:
            raised = in_child(lambda: [raised_by(lambda: pipe(workload.x)), raised_by(pipe.close)])
        finally:
            forked.set()
            thread.join()
        assert raised[0].startswith(REFUSED)
        assert raised[1] == ""
        assert workload.worst(pipe.module) < 1e-10


@pytest.mark.parametrize("where", ["before the backward", "between two exits", "before the entry", "at the entry"])
def test_forked_in_a_backward(workload, no_leaks, where):
    """A hook of the caller's graph forks; the child's engine goes on and reaches the pipeline's nodes."""
    children = []

    def fork(gradients):
        if not children:
            # What the hook raises ends the backward in the child, as the refusal by the pipeline's next node does.
            goes_on = nodes["Entry"].pipeline_backward.finish if where == "at the entry" else loss_again.backward
            children.append(in_child(lambda: raised_by(goes_on)))

    with pipeline(workload.model()).sync() as pipe:
        output = pipe(workload.x)
        loss = mse(output, workload.target)
        loss_again = mse(pipe(workload.x), workload.target)
        nodes = {name: node for node in _nodes(loss.grad_fn) for name in ("Exit", "Entry") if name in node.name()}
        if where == "before the backward":
            output.register_hook(fork)
        else:
            nodes["Exit" if where == "between two exits" else "Entry"].register_prehook(fork)
        loss.backward()
        nodes.clear()  # A cycle through the hook, which the collector does not see.
        assert [text[: len(REFUSED)] for text in children] == [REFUSED]
        assert workload.worst(pipe.module) < 1e-10


def _nodes(root):
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [edge for edge, _ in node.next_functions]


@pytest.mark.promise("Your own program", "A forked child and its end do not affect the pipeline of the parent.")
def test_finalizers_of_the_child_leave_the_parent_alone(workload, monkeypatch, no_leaks):
    """A loop's wake-up descriptor is shared with the child, which must not write to it."""
    monkeypatch.setattr(portal, "new_event_loop", asyncio.new_event_loop)
    held = {"pipe": pipeline(workload.model()).sync().__enter__()}
    held["loss"] = mse(held["pipe"](workload.x), workload.target)
    held["loss"].backward(retain_graph=True)
    held["loop"] = held["pipe"]._tenancy.pool.portal.loop

    def child():
        writes = []
        held["loop"]._write_to_self = lambda: writes.append("written")
        raised_by(held["loss"].backward)
        held["pipe"].close()
        held.clear()
        gc.collect()
        return writes

    assert in_child(child) == []
    held["loss"].backward()
    held["pipe"].close()
    held.clear()


EXITS = """
import os, sys, torch
from torch import nn
from asyncpipe import Pipeline
pipe = Pipeline([nn.Linear(3, 3), nn.Linear(3, 3)], ["cpu:0", "cpu:1"], microbatches=2).sync().__enter__()
loss = pipe(torch.randn(4, 3)).sum()
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    loss.backward()
    pipe(torch.randn(4, 3)).sum().backward()
    pipe.close()
    print("status", status)
sys.exit(0)
"""


@pytest.mark.promise("Your own program", "A forked child and its end do not affect the pipeline of the parent.")
def test_a_child_that_exits_as_programs_do():
    """With Python's own end of the process: its finalizers and its functions for ``atexit``."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EXITS], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "status 0\n", "")


@pytest.mark.promise(
    "Your own program", "A forked child may open a copy of its parent's pipeline, or one that was not open."
)
def test_a_child_opens_a_copy_and_one_that_was_not_open(workload, no_leaks):
    unopened = pipeline(workload.model())
    with pipeline(workload.model()).sync() as pipe:
        pipe.step(workload.x, workload.target)
        pipe.module.zero_grad()

        def child():
            torch.set_num_threads(1)  # the OpenMP threads of the parent are not here
            worst = []
            for mine in (copy.deepcopy(pipe._pipeline), unopened):
                with mine.sync() as own:
                    own.step(workload.x, workload.target)
                    worst.append(workload.worst(own.module))
            return max(worst)

        assert in_child(child) < 1e-10
    with pytest.raises(PipelineClosedError, match="not open"):
        unopened.sync().step(workload.x, workload.target)


class Rows(Dataset):
    """Rows of a batch. The workers' copies of it hold an open pipeline."""

    def __init__(self, workload, pipe):
        self.workload = workload
        self.pipe = pipe

    def __len__(self):
        return len(self.workload.x)

    def __getitem__(self, index):
        return self.workload.x[index], self.workload.target[index]


@pytest.mark.promise("Your own program", "Forked workers of a `DataLoader` may hold an open pipeline.")
def test_a_data_loader_with_forked_workers(workload, no_leaks):
    with pipeline(workload.model()).sync() as pipe:
        for _ in range(2):
            loader = DataLoader(Rows(workload, pipe), batch_size=12, num_workers=2, multiprocessing_context="fork")
            for x, target in loader:
                pipe.module.zero_grad()
                pipe.step(x, target)
                assert workload.worst(pipe.module) < 1e-10
            del loader
