"""Stages in worker processes: the same bits as on threads, the same errors, and nothing that is left."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import sys
import threading
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from asyncpipe import (
    Arguments,
    Batch,
    DevicePool,
    Feed,
    Pipeline,
    StageFactory,
    TaskError,
    pop,
    skippable,
    stash,
    trace,
)
from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.errors import (
    ArgumentTypeError,
    BatchError,
    EdgeError,
    OptionError,
    PipelineClosedError,
    WorkerLostError,
)
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.pipeline import remote_stages
from asyncpipe.pipeline.pool_options import PoolOptions
from asyncpipe.pipeline.workers import Workers, assign_workers, check_transport
from asyncpipe.testing import InlineExecutor

pytestmark = pytest.mark.timeout(120)


class Head(nn.Module):
    """The embedding's weight once more, as the output layer."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x.mean(1) @ self.weight.T


class Fails(nn.Module):
    """Does ``how`` in one of its calls."""

    def __init__(self, how, call):
        super().__init__()
        self.how, self.call, self.calls = how, call, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.call:
            if self.how == "raise":
                raise ValueError("this call fails")
            os.kill(os.getpid(), self.how) if self.how else os._exit(3)
        return x


def make_model(tied=False):
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    middle = [nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    head = Head(embedding) if tied else nn.Sequential(nn.Flatten(), nn.Linear(40, 11))
    return nn.Sequential(embedding, *middle, head).double()


def counted(output, target):
    return nn.functional.cross_entropy(output, target), len(target)


async def train(pool=None, *, model=None, devices=("cpu:0", "cpu:1"), overlap=False, **options):
    """The losses and the outputs of some steps, and the state behind them."""
    torch.manual_seed(5)
    batches = [(torch.randint(11, (13, 5)), torch.randint(11, (13,))) for _ in range(3)]
    options = {
        "microbatches": 4,
        "balance": [2, 2, 2, 2],
        "schedule": "interleaved",
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    } | options
    async with Pipeline(model or make_model(), list(devices), pool=pool, **options) as pipe:
        if overlap:
            results = [result async for result in pipe.steps(batches)]
        else:
            results = [await pipe.step(*batch) for batch in batches]
        pipe.eval()
        results.append(await pipe.step(*batches[0]))
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        return [result.loss for result in results], [result.outputs for result in results], state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"schedule": "gpipe", "balance": [3, 5], "loss_fn": counted},
        {"schedule": "1f1b", "devices": ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], "checkpoint": "always"},
        {"order": "hint", "checkpoint": "never"},
        {"schedule": "zbv", "model": True},
        {"schedule": "zb-h1", "balance": [4, 4], "loss_fn": counted},
        {"model": True, "loss_fn": counted},
    ],
    ids=lambda options: "-".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()) or "plain",
)
def test_the_same_bits_as_on_threads(pool, options):
    runs = []
    for where in (None, pool):
        model = make_model(tied=options.get("model", False))
        runs.append(asyncio.run(train(where, **(options | {"model": model}))))
    (losses, outputs, state), (remote_losses, remote_outputs, remote_state) = runs
    assert all(map(torch.equal, remote_losses, losses))
    assert all(map(torch.equal, remote_outputs, outputs))
    assert list(remote_state) == list(state)
    assert all(torch.equal(remote_state[name], state[name]) for name in state)


def test_the_same_bits_by_connection():
    """Activations and gradients of the last case are too large to go with their headers."""
    asyncio.run(same_bits_by_connection())


async def same_bits_by_connection():
    wide = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 20_000), nn.Tanh(), nn.Flatten(), nn.Linear(100_000, 11))
    cases = [
        {"overlap": True, "loss_fn": counted},
        {"model": make_model(tied=True), "schedule": "zbv"},
        {"model": wide, "balance": [2, 3], "schedule": "1f1b"},
    ]
    async with DevicePool(workers="processes", transport="connection") as pool:
        for options in cases:
            model = options.pop("model", None) or make_model()
            here = await train(model=copy.deepcopy(model), **options)
            there = await train(pool, model=model, **options)
            for ours, theirs in zip(here, there, strict=True):
                torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


async def test_a_task_that_raises_is_the_same_error_and_the_step_is_undone(pool):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fails("raise", 3)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, pool=pool, balance=[1, 2], **options) as pipe:
        before = pipe.state_dict()
        with pytest.raises(TaskError, match=r"F\(1,1\) failed .* this call fails") as raised:
            await pipe.step(x, x)
        assert isinstance(raised.value.__cause__, ValueError)
        assert 'raise ValueError("this call fails")' in str(raised.value.__cause__.__cause__)
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        await pipe.step(x, x)
        assert not torch.equal(pipe.state_dict()["0.weight"], before["0.weight"])


class Watcher:
    """Keeps what observers are told."""

    def __init__(self):
        self.records, self.changes = [], []

    def step_completed(self, record):
        self.records.append(record)

    def worker_changed(self, change):
        self.changes.append((change.worker, change.state, change.devices, change.is_restart))


async def test_what_observers_see_of_workers(pool):
    watcher, collector = Watcher(), PipelineCollector()
    await train(pool, overlap=True, observers=[watcher, collector])
    assert watcher.changes == [(name, "up", (name,), False) for name in ("cpu:0", "cpu:1")]
    for record in watcher.records:
        notes = record.notes
        assert notes.workers.keys() == {"cpu:0", "cpu:1"}
        assert all(each.pid == pool.workers.up[name].pid for name, each in notes.workers.items())
        copies = {task.number for task in record.graph.tasks if task.source is not None}
        assert copies <= notes.arrived.keys()
        began = {event.task: event.started for _, event in record.journal if isinstance(event, TaskCompleted)}
        for task, arrived in notes.arrived.items():
            # A task ends when what it has made is sent, so the message may be there before.
            assert min(began[other] for other in record.graph.dependencies[task]) < arrived <= began[task]
        assert all(notes.workers[name].use.resident_bytes > 1 << 20 for name in notes.workers)
    totals = collector.snapshot()
    copied = totals.counters["copy_bytes"]
    crossings = sum(len(record.notes.arrived) for record in watcher.records)
    assert copied.keys() == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    for way in copied:
        assert totals.counters["edge_bytes"][way] == copied[way] > 0
    assert sum(totals.counters["edge_messages"].values()) == crossings


async def test_a_cancelled_step_ends_in_all_workers(pool):
    async with Pipeline(
        make_model(), ["cpu:0", "cpu:1"], microbatches=4, pool=pool, balance=[4, 4],
        loss_fn=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    ) as pipe:  # fmt: skip
        batch = torch.randint(11, (13, 5)), torch.randint(11, (13,))
        for _ in range(5):
            step = asyncio.ensure_future(pipe.step(*batch))
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        await pipe.step(*batch)


def test_a_worker_that_dies_fails_the_steps_on_it_and_another_takes_its_place():
    asyncio.run(lose_and_replace())


async def lose_and_replace():
    threads = threading.active_count()
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    x, devices = torch.randn(8, 4), ["cpu:0", "cpu:1"]
    watcher = Watcher()
    never = options | {"microbatches": 4, "checkpoint": "never", "observers": [watcher]}
    line, losses = nn.Sequential(nn.Linear(4, 4)), []
    alone = Pipeline(deepcopy(line), ["cpu:0"], microbatches=4, **options)
    async with DevicePool(workers="processes") as pool:
        beside = Pipeline(line, ["cpu:0"], microbatches=4, pool=pool, **options)

        async def train_beside(over):
            while not over.is_set():
                losses.append((await beside.step(x, x)).loss)

        async with beside:
            for how in (None, signal.SIGKILL):
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fails(how, 2))
                status = "exited with status 3" if how is None else f"was killed by {how.name}"
                async with Pipeline(model, devices, pool=pool, balance=[1, 2], **never) as pipe:
                    over = asyncio.Event()
                    training = asyncio.ensure_future(train_beside(over))
                    with pytest.raises(
                        WorkerLostError, match=rf"^worker 'cpu:1' {status}, while it ran F\(1,1\) on cpu:1"
                    ) as raised:
                        await pipe.step(x, x)
                    assert raised.value.running == ("F(1,1) on cpu:1",)
                    over.set()
                    await training
                    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                    async with Pipeline(model, devices, microbatches=4, pool=pool, **options) as successor:
                        # The worker that has the lost one's place does not know the old pipeline.
                        with pytest.raises(WorkerLostError, match=rf"{status}$"):
                            await pipe.step(x, x)
                        with pytest.raises(WorkerLostError):
                            pipe.state_dict()
                        await successor.step(x, x)
                        losses.append((await beside.step(x, x)).loss)
    here, there = (("cpu:0", "up", ("cpu:0",), False), ("cpu:1", "up", ("cpu:1",), False))
    gone = ("cpu:1", "lost", ("cpu:1",), False)
    # The second worker is started anew for the successor, which has no observers.
    assert watcher.changes == [here, there, gone, here, there, gone]
    ends = [(record.outcome, record.notes.workers["cpu:1"].state) for record in watcher.records]
    assert ends == [("failed", "lost"), ("failed", "lost")]
    async with alone:
        # Neither a step nor a bit: it shares one worker with the pipelines that failed, and not the lost one.
        assert all([torch.equal(loss, (await alone.step(x, x)).loss) for loss in losses])
    assert threading.active_count() == threads


async def test_two_pipelines_that_need_the_same_worker_start_it_once_and_one_that_cannot_load_leaves_nothing():
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    x, devices = torch.randn(8, 4), ["cpu:0", "cpu:1"]
    async with DevicePool(workers=dict.fromkeys(devices, "one") | {"cpu:2": "two"}) as pool:
        one, two = (Pipeline(make_line(), devices, microbatches=2, pool=pool, **options) for _ in range(2))
        await asyncio.gather(one.__aenter__(), two.__aenter__())
        assert pool.workers.up.keys() == {"one"}
        broken = nn.Sequential(nn.Linear(4, 4), OnlyHere(), nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="it cannot be had in worker two") as raised:
            async with Pipeline(broken, ["cpu:0", "cpu:2"], microbatches=2, pool=pool, balance=[1, 2], **options):
                pass
        assert "in worker 'two'" in str(raised.value.__cause__)
        await asyncio.gather(one.step(x, x), two.step(x, x))
        await one.aclose()
        await two.aclose()


async def test_what_a_worker_raises_counts_more_than_what_others_say_of_their_edges_to_it():
    """Though those may say it earlier; a loss counts most. Private: no test can hold up one worker's answer."""
    loop = asyncio.get_running_loop()
    for error in (RuntimeError("it cannot be had"), WorkerLostError("two", "exited with status 1")):
        others, mine = loop.create_future(), loop.create_future()
        others.set_exception(EdgeError("worker 1 went away while edges were connected"))
        loop.call_later(0.01, mine.set_exception, error)
        with pytest.raises(type(error)):
            await remote_stages._all_answer([others, mine])


def make_line():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class OnlyHere(nn.Module):
    """Cannot arrive in the worker that is called ``two``."""

    def __setstate__(self, state):
        super().__setstate__(state)
        if sys.orig_argv[-1] == "two":  # A worker's name is the last argument of its process.
            raise RuntimeError("it cannot be had in worker two")


async def test_what_cannot_work_is_refused_with_what_to_do():
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(OptionError, match="workers must be one of"):
        Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, workers="process")
    pipe = Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, workers="processes", loss_fn=nn.functional.mse_loss)
    with pytest.raises(OptionError, match=r"parameters\(\) needs the stages in this process.*optimizer="):
        pipe.parameters()
    with pytest.raises(OptionError, match=r"to\(\) needs the stages.*cast the model before you give it"):
        pipe.to(torch.float64)
    with pytest.raises(PipelineClosedError):
        await pipe.step(x, x)
    with pytest.raises(OptionError, match=r"pipe\(x\).* needs the stages in this process"):
        pipe(x)
    with pytest.raises(OptionError, match="executors run tasks in this process"):
        DevicePool(workers="processes", executors=InlineExecutor)
    head, frozen = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
    for name, function in {
        "loss_fn": lambda y, _: head(y).sum(),
        "optimizer": lambda _: torch.optim.SGD([head.bias]),
    }.items():
        with pytest.raises(OptionError, match=rf"{name} refers to a tensor of shape .* requires a gradient.*threads"):
            Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, workers="processes", **{name: function})
        Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, **{name: function})
    Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, workers="processes", loss_fn=lambda y, _: frozen(y).sum())
    with pytest.raises(
        OptionError, match=r"transport must be one of 'shared_memory', 'host_memory', 'connection'.* got 'pigeon'"
    ):
        DevicePool(workers="processes", transport="pigeon")
    with pytest.raises(OptionError, match=r"transport='connection' is for workers; leave it out"):
        DevicePool(transport="connection")


def fed(step, folder=None, samples=13):
    """Draws by torch, and counts; notes who has called it."""
    if folder is not None:
        Path(folder, f"{step} {os.getpid()}").touch()
        if Path(folder, "breaks").exists():
            raise LookupError(f"no data for step {step}")
    samples += os.getpid() % 1000 if samples < 0 else 0
    return torch.randint(11, (samples, 5)), torch.full((samples,), step % 11)


@pytest.mark.promise(
    "Bit-identical results", "A feed in the workers is bit-identical to the same mini-batches from the caller."
)
@pytest.mark.parametrize("overlap", [False, True])
async def test_a_feed_makes_in_the_workers_what_a_caller_would_give(pool, tmp_path, overlap):
    feed = Feed(f"{__name__}:fed", {"folder": tmp_path}, seed=3)
    adam = {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.05)}
    options = {"microbatches": 4, "balance": [3, 3, 2], "loss_fn": nn.functional.cross_entropy, **adam}
    ends = []
    for where, given in ((None, True), (None, False), (pool, False)):
        torch.manual_seed(5)
        pipe = Pipeline(make_model(), ["cpu:0", "cpu:1", "cpu:2"], pool=where, feed=feed, **options)
        async with pipe:
            pipe.feed_step = 7
            mine = [Batch(*feed.batch(step)) if given else Batch() for step in range(7, 11)]
            for called in tmp_path.iterdir():
                called.unlink()
            if overlap:
                results = [result async for result in pipe.steps(mine)]
            else:
                results = [await (pipe.step(*each[:2]) if given else pipe.step()) for each in mine]
            assert pipe.feed_step == (7 if given else 11)
            state = {name: value.clone() for name, value in pipe.state_dict().items()}
            ends.append(([result.loss for result in results], [result.outputs for result in results], state))
    for losses, outputs, state in ends[1:]:
        assert all(map(torch.equal, losses, ends[0][0]))
        assert all(map(torch.equal, outputs, ends[0][1]))
        assert all(torch.equal(state[name], ends[0][2][name]) for name in state)
    callers = {}
    for step, pid in (path.name.split() for path in tmp_path.iterdir()):
        callers.setdefault(int(step), set()).add(int(pid))
    workers = {pool.workers.up[name].pid for name in ("cpu:0", "cpu:2")}
    assert all(callers[step] == workers for step in range(7, 11))


@pytest.mark.promise(
    "A step that fails", "The step after one that failed or was cancelled gets the same mini-batch from its feed."
)
async def test_a_feed_that_fails_leaves_its_step_to_be_made_again(pool, tmp_path):
    options = {"microbatches": 4, "balance": [4, 4], "loss_fn": nn.functional.cross_entropy}
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    devices = ["cpu:0", "cpu:1"]
    for where in (None, pool):
        feed = Feed(fed, {"folder": tmp_path})
        async with Pipeline(make_model(), devices, pool=where, feed=feed, **options, **sgd) as pipe:
            await pipe.step()
            (tmp_path / "breaks").touch()
            pipe.feed_step = 5
            for _ in range(2):
                with pytest.raises(LookupError, match="no data for step 5"):
                    await pipe.step()
                with pytest.raises(LookupError, match="no data for step 5"):
                    [result async for result in pipe.steps([Batch(), Batch()])]
            (tmp_path / "breaks").unlink()
            step = asyncio.ensure_future(pipe.step())
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            assert (await pipe.step()).loss is not None
            assert pipe.feed_step == 6
            with pytest.raises(OptionError, match="a target was given without x"):
                await pipe.step(target=torch.zeros(3))
            with pytest.raises(OptionError, match="feed_step must be an integer of at least 0, got -1"):
                pipe.feed_step = -1
    unlike = Feed(fed, {"samples": -1})
    async with Pipeline(make_model(), devices, pool=pool, feed=unlike, **options, **sgd) as pipe:
        with pytest.raises(
            BatchError, match=r"makes different mini-batches for step 0: micro-batches of .* must follow"
        ):
            await pipe.step()
        with pytest.raises(BatchError, match="in worker 'cpu:1'"):
            [result async for result in pipe.steps([Batch()])]
    async with Pipeline(make_model(), devices, pool=pool, **options, **sgd) as pipe:
        with pytest.raises(OptionError, match="a step without a mini-batch needs a feed"):
            await pipe.step()
    with pytest.raises(ArgumentTypeError, match="feed is 'module:function' or a Feed, got int"):
        Pipeline(make_model(), devices, feed=3, **options)
    traced = trace(make_model(), Arguments.of(torch.randint(11, (3, 5))), split=2)
    with pytest.raises(OptionError, match="several stages of a traced model may take something"):
        Pipeline(traced, devices, microbatches=2, pool=pool, feed="tests:nothing", loss_fn=nn.functional.mse_loss)


class Counts(nn.Module):
    """Remembers, outside of its tensors, how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, calls):
        self.calls = calls


async def test_the_state_is_that_of_whoever_has_the_stage_before_opening_while_open_and_never_after(pool):
    x, options = torch.randn(8, 4), {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "checkpoint": "never"}
    model, loaded = nn.Sequential(Counts(), Counts()), nn.Sequential(Counts(), Counts()).state_dict()
    loaded["0._extra_state"], loaded["1._extra_state"] = 10, 20
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    pipe = Pipeline(model, ["cpu:0", "cpu:1"], pool=pool, **options, **sgd)
    assert torch.equal(pipe.state_dict()["1.linear.weight"], model[1].linear.weight)
    assert pipe.optimizer_states() == {}
    with pytest.raises(PipelineClosedError, match="optimizers are made in the workers when the pipeline opens"):
        pipe.load_optimizer_states({})
    pipe.load_state_dict(loaded)
    async with pipe:
        found = pipe.state_dict()
        assert list(found) == list(loaded)
        assert (found["0._extra_state"], found["1._extra_state"]) == (10, 20)
        assert torch.equal(found["1.linear.weight"], loaded["1.linear.weight"])
        await pipe.step(x, x)
        found = pipe.state_dict()
        assert (found["0._extra_state"], found["1._extra_state"]) == (12, 22)
        pipe.load_state_dict(loaded)
        found = pipe.state_dict()
        assert (found["0._extra_state"], found["1._extra_state"]) == (10, 20)
    with pytest.raises(PipelineClosedError, match="its stages with all they held have ended"):
        pipe.state_dict()
    built = Pipeline(StageFactory(make_counts, stages=2), ["cpu:0", "cpu:1"], pool=pool, **options)
    with pytest.raises(PipelineClosedError, match=r"StageFactory\(make_counts\) makes the stages in the workers when"):
        built.state_dict()


def make_counts(stage):
    return Counts()


async def test_the_schedule_changes_and_a_state_is_loaded_between_two_steps(pool):
    batch = torch.randint(11, (13, 5)), torch.randint(11, (13,))
    options = {"microbatches": 4, "balance": [4, 4], "loss_fn": nn.functional.cross_entropy, "checkpoint": "never"}
    ends = []
    for where in (None, pool):
        torch.manual_seed(3)
        sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
        async with Pipeline(make_model(), ["cpu:0", "cpu:1"], pool=where, **options, **sgd) as pipe:
            begin = {name: value.clone() for name, value in pipe.state_dict().items()}
            await pipe.step(*batch)
            pipe.change_schedule("gpipe")
            pipe.load_state_dict(begin)
            pipe.module[1].requires_grad_(False)
            ends.append((await pipe.step(*batch)).loss)
            ends.append(pipe.state_dict()["8.1.weight" if "8.1.weight" in begin else list(begin)[-2]].clone())
            assert torch.equal(pipe.state_dict()["1.weight"], begin["1.weight"])
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])


class Unreadable(OneFOneB):
    """A schedule that no worker can read."""

    def __reduce__(self):
        return _unreadable, (os.getpid(),)


def _unreadable(controller):
    if os.getpid() != controller:
        raise ArithmeticError("no worker can read this")
    return Unreadable()


@pytest.mark.promise(
    "Your own program",
    "A schedule that changes during a step is followed from the next step on; one that a worker refuses, by nobody.",
)
async def test_a_schedule_that_changes_during_a_step_is_followed_later_and_a_refused_one_by_nobody(pool):
    batches = [Batch(torch.randn(12, 6).double(), torch.randn(12, 6).double()) for _ in range(6)]
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    ends = []
    for changes in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))).double()
        options = {"microbatches": 4, "loss_fn": nn.functional.mse_loss, "checkpoint": "never", **sgd}
        async with Pipeline(model, ["cpu:0", "cpu:1"], pool=pool, **options) as pipe:
            losses, schedules = [], []
            async for result in pipe.steps(batches):
                losses.append(float(result.loss))
                schedules.append(result.record.graph.schedule)
                if changes and len(losses) == 1:
                    # The next step is under way.
                    await asyncio.to_thread(pipe.change_schedule, "zb-h1")
                if changes and len(losses) == 3:
                    with pytest.raises(ArithmeticError, match="no worker can read this"):
                        await asyncio.to_thread(pipe.change_schedule, Unreadable())
                    assert pipe.schedule.name == "zb-h1"
        ends.append(losses)
    assert schedules == sorted(schedules)
    assert set(schedules) == {"1f1b", "zb-h1"}
    assert schedules[-2:] == ["zb-h1"] * 2
    assert ends[1] == pytest.approx(ends[0], abs=1e-10)


def test_which_worker_has_which_device():
    devices = resolve_devices(["cpu:0", "cpu:1", "cpu:0"])
    assert assign_workers(devices, "processes") == {"cpu:0": "cpu:0", "cpu:1": "cpu:1", "cpu:0#1": "cpu:0#1"}
    two = {"cpu:0": "a", "cpu:1": "b", "cpu:0#1": "a"}
    assert assign_workers(devices, two) == two
    with pytest.raises(OptionError, match="names no worker for cpu:0#1"):
        assign_workers(devices, {"cpu:0": "a", "cpu:1": "b"})


async def test_a_worker_that_sees_its_own_accelerators_numbers_them_itself(monkeypatch):
    """And it has no other one later, which it would take for one of its own, before it is started again."""
    workers, up, started = Workers(PoolOptions(workers={})), {}, []

    async def start(*names, devices):
        started.append(devices)
        up.update({name: SimpleNamespace(name=name) for name in names})
        return list(up.values())

    monkeypatch.setattr(workers, "_is_open", True)
    monkeypatch.setattr(workers, "worker_of", lambda devices: {each.name: "a" for each in devices})
    monkeypatch.setattr(workers, "_group", SimpleNamespace(start=start, workers=up))
    one, two, three = (Device(f"cuda:{k}", torch.device("cuda", k)) for k in (1, 2, 3))
    await workers.admit([three, one])
    assert [workers.own_number("a", each) for each in (one, three)] == [0, 1]
    await workers.admit([two])
    with pytest.raises(OptionError, match=r"worker 'a' was started for cuda:1, cuda:3, and sees no cuda:2; give"):
        workers.own_number("a", two)
    up.clear()
    await workers.admit([two])
    assert started == [{"a": ("cuda:3", "cuda:1")}, {"a": ("cuda:3", "cuda:1", "cuda:2")}]
    assert workers.own_number("a", two) == 1


def test_what_a_transport_cannot_carry(monkeypatch):
    devices = [Device(f"cuda:{k}", torch.device("cuda", k % 2)) for k in range(3)]
    alone = {device.name: device.name for device in devices}
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    check_transport("nccl", devices[:2], alone)
    check_transport("nccl", devices, {"cuda:0": "a", "cuda:1": "b", "cuda:2": "a"})
    with pytest.raises(OptionError, match=r"NCCL takes no two workers on one device, and 'cuda:0' and 'cuda:2' share"):
        check_transport("nccl", devices, alone)
    with pytest.raises(OptionError, match=r"one CUDA device each, and worker 'a' has cuda:0, cuda:1; use 'shared_memo"):
        check_transport("nccl", devices, dict.fromkeys(alone, "a"))
    with pytest.raises(OptionError, match=r"one CUDA device each, and worker 'cpu:0' has cpu; use 'shared_memory'"):
        Pipeline(make_model(), ["cpu:0", "cpu:1"], microbatches=2, workers="processes", transport="nccl")
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(OptionError, match="this torch has no nccl; use transport='shared_memory'"):
        check_transport("nccl", devices[:2], alone)


class Apply(nn.Module):
    """A function of this module, by its name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, *args):
        return globals()[self.name](*args)


def with_gaps(x):
    return torch.cat([x, x], -1)[..., ::2]


def spread(x):
    return x.mean(-1, keepdim=True).expand(*x.shape[:-1], 6)


def behind(x):
    return torch.cat([x.detach().reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)


def with_strides(x):
    return x + 1000 * torch.tensor([*x.stride(), x.data_ptr() % 64]).sum()


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIONS = {"loss_fn": nn.functional.mse_loss, "optimizer": sgd}


@pytest.mark.parametrize("shape", ["with_gaps", "spread", "behind"])
async def test_tensors_keep_their_strides_and_their_alignment_on_the_way_to_a_worker(pool, shape):
    x, ends = torch.randn(49)[1:].view(6, 8).T, []
    for where in (None, pool):
        torch.manual_seed(0)
        first = Apply("with_strides")
        model = nn.Sequential(first, nn.Linear(6, 6), Apply(shape), Apply("with_strides"), nn.Linear(6, 6))
        async with Pipeline(
            model, ["cpu:0", "cpu:1"], balance=[3, 2], microbatches=3, checkpoint="never", pool=where, **OPTIONS
        ) as pipe:
            ends.append((await pipe.step(x, torch.zeros(8, 6))).outputs)
    assert torch.equal(*ends)


async def test_what_is_frozen_before_a_pipeline_opens_is_frozen(pool):
    x, ends = torch.randn(8, 4), []
    for where in (None, pool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = Pipeline(model, ["cpu:0", "cpu:1"], balance=[1, 2], microbatches=2, pool=where, **OPTIONS)
        pipe.module[0].requires_grad_(False)
        async with pipe:
            await pipe.step(x, x)
            pipe.module[0].requires_grad_(True)
            await pipe.step(x, x)
            ends.append({name: value.clone() for name, value in pipe.state_dict().items()})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


class Marked(torch.Tensor):
    """A tensor with a class of its own."""


def marked(x):
    return x.as_subclass(Marked)


async def test_a_tensor_of_another_class_is_refused_where_it_would_lose_it(pool):
    x, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), Apply("marked"), nn.Linear(4, 4))
    async with Pipeline(model, ["cpu:0", "cpu:1"], balance=[2, 1], microbatches=2, pool=pool, **OPTIONS) as pipe:
        with pytest.raises(TaskError, match="a Marked, which would arrive as"):
            await pipe.step(x, x)


def with_new_tensors(x):
    return x + (torch.arange(4) * 0.1 + torch.tensor(1 / 3)).to(x.dtype)


async def test_workers_compute_by_the_settings_of_their_controller(pool):
    x, ends = torch.randn(8, 4, dtype=torch.float64), []
    for where in (None, pool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Apply("with_new_tensors"), nn.Linear(4, 4)).double()
        async with Pipeline(
            model, ["cpu:0", "cpu:1"], balance=[1, 2], microbatches=2, pool=where, **OPTIONS
        ) as pipe:  # fmt: skip
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                try:
                    ends.append((await pipe.step(x, x, update=False)).outputs)
                finally:
                    torch.set_default_dtype(torch.float32)
    assert not torch.equal(ends[0], ends[1])
    assert all(map(torch.equal, ends[:3], ends[3:]))


async def test_messages_that_wait_for_long_hold_back_no_others(pool):
    # Stage 3 takes what stage 0 sends to it when all micro-batches have passed stages 1 and 2, on the same edges.
    x = torch.randn(100, 4)
    model = nn.Sequential(Down(), nn.Linear(4, 4), nn.Linear(4, 4), Up(), nn.Linear(4, 4))
    options = OPTIONS | {"balance": [1, 1, 1, 2], "schedule": "looped-bfs", "microbatches": 100, "checkpoint": "never"}
    async with Pipeline(model, ["cpu:0", "cpu:1"], pool=pool, **options) as pipe:
        async for result in pipe.steps([(x, x)] * 3):
            assert len(result.losses) == 100


async def test_a_step_that_is_cancelled_before_it_begins_takes_no_mode_along(pool):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(8, 4)
    async with Pipeline(model, ["cpu:0", "cpu:1"], balance=[2, 2], microbatches=2, pool=pool, **OPTIONS) as pipe:
        await pipe.step(x, x)
        pipe.eval()
        held, let_go = threading.Event(), threading.Event()

        def hold():
            held.set()
            assert let_go.wait(60)

        pool.portal.loop.call_soon_threadsafe(hold)
        assert held.wait(60)
        stepping = asyncio.ensure_future(pipe.step(x))
        await asyncio.sleep(0)
        stepping.cancel()
        await asyncio.sleep(0)
        let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        first, second = [(await pipe.step(x)).outputs for _ in range(2)]
        assert torch.equal(first, second)


class Tells:
    """An observer that tells a thread of a step's end."""

    def __init__(self):
        self.done = threading.Event()

    def step_completed(self, record):
        self.done.set()


async def test_a_step_that_is_cancelled_when_its_workers_are_done_leaves_nothing(pool):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, tells, ends = torch.randn(8, 4), Tells(), []
    options = OPTIONS | {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "observers": [tells]}
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, pool=pool, **options) as pipe:
        begin = pipe.state_dict()
        for cancelled in (True, False):
            pipe.load_state_dict(begin)
            if cancelled:
                stepping = asyncio.ensure_future(pipe.step(x, x, update=False))
                await asyncio.sleep(0)
                # This loop does not hear of it.
                assert tells.done.wait(60)
                for _ in range(10):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), pool.portal.loop).result(60)
                stepping.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await stepping
            await pipe.step(x, x)
            ends.append(pipe.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


async def test_a_failure_among_overlapping_steps_leaves_the_gradients_as_on_threads(pool):
    chance = torch.Generator().manual_seed(0)
    good, bad = torch.randn(8, 4, generator=chance), torch.randn(8, 4, generator=chance)
    bad[5] = torch.nan
    ends = []
    for where in (None, pool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Apply("no_nan"), nn.Linear(4, 4))
        async with Pipeline(
            model, ["cpu:0", "cpu:1"], balance=[2, 3], microbatches=4, pool=where, **OPTIONS
        ) as pipe:  # fmt: skip
            await pipe.step(good, good, update=False)
            with pytest.raises(TaskError, match="is no number"):
                async for _ in pipe.steps([(bad, good), (good, good)]):
                    pass
            with pytest.raises(TaskError, match="is no number"):
                async for _ in pipe.steps([(good, good), (good, good), (bad, good), (good, good)]):
                    pass
            await pipe.step(good, good, update=False)
            await pipe.step(good, good)
            ends.append({name: value.clone() for name, value in pipe.state_dict().items()})
    here, there = ends
    assert all(torch.equal(here[name], there[name]) for name in here)


def no_nan(x):
    if x.isnan().any():
        raise ValueError("this is no number")
    return x


async def test_gradients_are_accumulated_only_for_an_optimizer(pool):
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    async with Pipeline(
        model, ["cpu:0", "cpu:1"], microbatches=2, pool=pool, loss_fn=nn.functional.mse_loss
    ) as pipe:  # fmt: skip
        for update in (True, False):
            with pytest.raises(OptionError, match="give the pipeline an optimizer="):
                await pipe.step(x, x, update=update)
