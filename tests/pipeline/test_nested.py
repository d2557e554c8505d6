"""A stage, a loss or a hook calls a pipeline: of the same pool, of another one, or the one that is running."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from thread_helpers import run_all
from torch import nn

from asyncpipe import DevicePool, Pipeline
from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.errors import BackwardError, NestedWaitError, OptionError, PipelineClosedError, TaskError
from asyncpipe.testing import EmulatedExecutor, InlineExecutor

mse = nn.functional.mse_loss


def pipeline(model, pool=None, **options):
    options = {"microbatches": 4, "checkpoint": "except_last"} | options
    return Pipeline(model, ["cpu:0", "cpu:1"], pool=pool, **options)


def teacher_model(dropout=0.0):
    torch.manual_seed(23)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)]
    return nn.Sequential(*layers).double()


def distilled(teacher, output, target):
    return mse(output, target) + mse(teacher(output), target)


@contextmanager
def classroom(workload, loss_fn=distilled, model=None, teacher=None, **options):
    """A student whose loss calls a teacher in the same pool; both are open."""
    with (
        DevicePool() as pool,
        pipeline(model or teacher_model(), pool, **teacher or {}).sync() as called,
        pipeline(workload.model(), pool, loss_fn=partial(loss_fn, called), **options).sync() as student,
    ):
        yield called, student


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def unsplit(workload, loss_fn, *models):
    """The gradients of the models, the first of which is the student, without a pipeline."""
    loss_fn(models[0](workload.x), workload.target).backward()
    return [gradients(model) for model in models]


# A loss that calls a teacher


PLACES = {
    "same pool": lambda: (pool := DevicePool(), pool),
    "another pool": lambda: (DevicePool(), DevicePool()),
    "inline": lambda: (pool := DevicePool(executors=InlineExecutor), pool),
    "emulated": lambda: (pool := DevicePool(executors=lambda name: EmulatedExecutor(name, lambda task: 0.0)), pool),
}


@pytest.mark.promise(
    "Your own program",
    "A loss, a stage or a hook may call a pipeline: results are right, and no device waits for itself.",
)
@pytest.mark.parametrize(
    ("place", "schedule", "checkpoint"),
    [
        *itertools.product(["same pool"], ["gpipe", "1f1b", "zb-h1"], ["never", "except_last", "always"]),
        *((place, "1f1b", "except_last") for place in ("another pool", "inline", "emulated")),
    ],
)
async def test_a_loss_calls_a_teacher(workload, place, schedule, checkpoint, no_leaks):
    """With gradients through the teacher, and for its parameters."""
    wanted = unsplit(workload, lambda y, t: distilled(plain, y, t), workload.model(), plain := teacher_model())
    one, other = PLACES[place]()
    options = {"schedule": schedule, "checkpoint": checkpoint}
    async with (
        one,
        nullcontext() if other is one else other,
        pipeline(model := teacher_model(), one, checkpoint=checkpoint) as teacher,
        pipeline(workload.model(), other, loss_fn=partial(distilled, teacher), **options) as student,
    ):
        result = await student.step(workload.x, workload.target)
        assert_close(gradients(student.module), wanted[0])
        assert_close(gradients(model), wanted[1])
        del result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_loss_calls_a_frozen_teacher(workload, mode, no_leaks):
    def loss_fn(teacher, output, target):
        with mode():
            known = teacher(target)
        return mse(output, known.clone())

    plain = teacher_model().requires_grad_(False)
    wanted = unsplit(workload, partial(loss_fn, plain), workload.model())[0]
    with classroom(workload, loss_fn, teacher_model().requires_grad_(False)) as (teacher, student):
        student.step(workload.x, workload.target)
        assert_close(gradients(student.module), wanted)
        mse(student(workload.x), teacher(workload.target)).backward()


# The running pipeline


@pytest.mark.promise(
    "Your own program",
    "A loss, a stage or a hook may call a pipeline: results are right, and no device waits for itself.",
)
async def test_the_running_pipeline(workload, no_leaks):
    """A loss that compares with what the model says of its target; on a pipeline that the running loop drives."""

    def loss_fn(model, output, target):
        with torch.no_grad():
            known = model(target[:, :6])
        return mse(output, known)

    plain = workload.model()
    wanted = unsplit(workload, partial(loss_fn, plain), plain)[0]
    async with pipeline(workload.model(), loss_fn=lambda *args: loss_fn(pipe, *args)) as pipe:
        await pipe.step(workload.x, workload.target)
        assert_close(gradients(pipe.module), wanted)


@pytest.mark.promise("Refused, not wrong", "Gradients through the running pipeline are refused inside a task.")
def test_gradients_through_the_running_pipeline_are_refused(workload, no_leaks):
    """Its lanes make them at that moment."""
    model = workload.model()
    with pipeline(model, loss_fn=lambda y, t: mse(pipe(t[:, :6]), y)).sync() as pipe:
        with pytest.raises(TaskError) as caught:
            pipe.step(workload.x, workload.target)
        assert isinstance(caught.value.__cause__, BackwardError)
        assert "a task asks for gradients of a pipeline while a step" in str(caught.value)
        assert gradients(model) == [None] * len(gradients(model))
        del caught
        pipe.eval()
        pipe.step(workload.x, workload.target)


# Stages and hooks


class Asks(nn.Module):
    """A layer that adds what another model says of its input. That one is no part of this layer."""

    def __init__(self, model):
        super().__init__()
        self.ask = [model]

    def forward(self, x):
        return x + self.ask[0](x)


@pytest.mark.promise(
    "Your own program",
    "A loss, a stage or a hook may call a pipeline: results are right, and no device waits for itself.",
)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_calls_a_pipeline(workload, place, checkpoint, no_leaks):
    def student(model):
        layers = [nn.Linear(8, 8).double(), nn.Linear(8, 8).double()]
        torch.manual_seed(5)
        for layer in layers:
            layer.reset_parameters()
        layers.insert(place + 1, Asks(model))
        return nn.Sequential(nn.Linear(6, 8).double().requires_grad_(False), *layers)

    torch.manual_seed(3)
    first = student(plain := teacher_model())
    wanted = unsplit(workload, mse, first, plain)
    with (
        DevicePool() as pool,
        pipeline(model := teacher_model(), pool, checkpoint=checkpoint).sync() as teacher,
    ):
        second = student(teacher)
        second[0].load_state_dict(first[0].state_dict())
        with pipeline(second, pool, loss_fn=mse, checkpoint=checkpoint, balance=[2, 2]).sync() as pipe:
            pipe.step(workload.x, workload.target)
            assert_close(gradients(second), wanted[0])
            assert_close(gradients(model), wanted[1])
            for each in (second, model):
                each.zero_grad()
            mse(pipe(workload.x), workload.target).backward()
            assert_close(gradients(second), wanted[0])
            assert_close(gradients(model), wanted[1])


@pytest.mark.promise(
    "Your own program",
    "A loss, a stage or a hook may call a pipeline: results are right, and no device waits for itself.",
)
def test_a_hook_calls_a_pipeline_and_differentiates(workload, no_leaks):
    """In a backward task: the hook replaces a gradient by one that it gets from a backward of its own."""

    def hook(model, gradient):
        x = gradient.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(model(x).square().sum(), x)[0]

    def hooked(model, module):
        module[4].register_forward_hook(lambda _, __, output: output.register_hook(partial(hook, model)) and None)
        return module

    plain = teacher_model()
    wanted = torch.cat([grads[None] for grads in [_microbatched(workload, hooked(plain, workload.model()))]])
    with DevicePool() as pool, pipeline(teacher_model(), pool).sync() as teacher:
        model = hooked(teacher, workload.model())
        with pipeline(model, pool, loss_fn=mse, checkpoint="never").sync() as pipe:
            pipe.step(workload.x, workload.target)
            torch.testing.assert_close(_flat(model)[None], wanted, rtol=0, atol=1e-10)


def _microbatched(workload, model):
    for x, target in zip(workload.x.split(3), workload.target.split(3), strict=True):
        (mse(model(x), target) / 4).backward()
    return _flat(model)


def _flat(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_module_in_a_stage_is_a_pipeline_itself(workload, no_leaks):
    """A ``GPipe`` among the layers of another one."""
    wanted = unsplit(workload, mse, nn.Sequential(workload.model(), teacher_model()))[0]
    inner = GPipe(teacher_model(), [2, 2], devices=["cpu", "cpu"], chunks=2)
    model = GPipe(nn.Sequential(workload.model(), inner), [1, 1], devices=["cpu", "cpu"], chunks=4)
    mse(model(workload.x), workload.target).backward()
    assert_close(gradients(model), wanted)


# What the task around it has entered does not reach in


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_draws_of_a_teacher_are_those_of_its_recomputation(workload, checkpoint, no_leaks):
    """Finite differences: the loss after a step along the gradient, with the same draws."""
    losses = {}
    for epsilon in (0.0, 1e-6):
        model, other = workload.model(0.5), teacher_model(0.5)
        with DevicePool() as pool, pipeline(other, pool, checkpoint=checkpoint).sync() as teacher:
            options = {"checkpoint": checkpoint, "loss_fn": partial(distilled, teacher)}
            with torch.no_grad():
                for parameter, direction in zip(model.parameters(), losses.get("along", []), strict=False):
                    parameter += epsilon * direction
            with pipeline(model, pool, **options).sync() as student:
                torch.manual_seed(99)
                losses[epsilon] = student.step(workload.x, workload.target).loss.item()
                losses.setdefault("along", gradients(model))
    slope = sum(float(gradient.square().sum()) for gradient in losses["along"])
    assert (losses[1e-6] - losses[0.0]) / 1e-6 == pytest.approx(slope, rel=1e-4)


def test_checkpoint_of_torch_around_the_call(workload, no_leaks):
    """Its hooks for saved tensors are the task's, not those of the pipeline inside."""

    def loss_fn(teacher, output, target):
        return mse(torch.utils.checkpoint.checkpoint(teacher, output, use_reentrant=False), target)

    wanted = unsplit(workload, partial(loss_fn, plain := teacher_model()), workload.model(), plain)
    with classroom(workload, loss_fn) as (teacher, student):
        student.step(workload.x, workload.target)
        assert_close(gradients(student.module), wanted[0])
        assert_close(gradients(teacher.module), wanted[1])


@pytest.mark.promise(
    "Refused, not wrong", "Calls inside a task that would change buffers twice, or deferred batch norms, are refused."
)
@pytest.mark.parametrize("again", [True, False])
def test_statistics_of_a_teacher(again, no_leaks):
    """They are counted once a call. A recomputation would call again, and find them changed: it is refused."""
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    first, second, plain = nn.Linear(4, 4), nn.Linear(4, 4), copy.deepcopy(other)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    for piece in x.split(4):
        plain(second(first(piece)))
    with DevicePool() as pool, pipeline(other, pool, microbatches=1, checkpoint="always").sync() as teacher:
        options = {"checkpoint": "always" if again else "never", "loss_fn": partial(distilled, teacher)}
        with pipeline(nn.Sequential(first, second), pool, microbatches=2, **options).sync() as student:
            if again:
                with pytest.raises(
                    TaskError, match="RecomputeError: a recomputation called a pipeline that changes its buffers"
                ):
                    student.step(x, target)
                teacher.eval()
            student.step(x, target)
    if not again:
        for layer, wanted in zip(other, plain, strict=True):
            for name, buffer in layer.named_buffers():
                torch.testing.assert_close(buffer, wanted.get_buffer(name))


# At the same time


class Meeting:
    """Lets threads meet: each waits in ``__call__`` until all are there, the first time."""

    def __init__(self, parties):
        self._barrier = threading.Barrier(parties)
        self._met = threading.local()

    def __call__(self):
        if not getattr(self._met, "before", False):
            self._met.before = True
            self._barrier.wait(30)


def step_together(workload, *pipes):
    run = [lambda pipe=pipe: pipe.step(workload.x, workload.target).loss and None for pipe in pipes]
    assert run_all(*run) == [None] * len(pipes)


@pytest.mark.promise(
    "Your own program",
    "A loss, a stage or a hook may call a pipeline: results are right, and no device waits for itself.",
)
def test_while_the_teacher_steps_on_the_same_devices(workload, before_task, no_leaks):
    """The teacher's own step waits for the lane of the student's task, which calls the teacher."""
    queued, submitted = threading.Event(), threading.Event()

    def loss_fn(output, target):
        if not queued.is_set():
            queued.set()
            assert submitted.wait(30)
        return distilled(teacher, output, target)

    def first_of_the_teacher(task):
        if task.id == "F(0,0)" and queued.is_set():
            submitted.set()

    before_task(first_of_the_teacher)
    with (
        DevicePool() as pool,
        pipeline(teacher_model(), pool, loss_fn=mse).sync() as teacher,
        pipeline(workload.model(), pool, loss_fn=loss_fn, checkpoint="never").sync() as student,
    ):

        def teach():
            assert queued.wait(30)
            teacher.eval().step(workload.target, workload.target)

        assert run_all(lambda: student.step(workload.x, workload.target).loss and None, teach) == [None, None]


@pytest.mark.parametrize("frozen", [True, False])
def test_two_students_with_one_teacher(workload, frozen, no_leaks):
    meeting = Meeting(2)
    wanted = unsplit(workload, lambda y, t: distilled(plain, y, t), workload.model(), plain := teacher_model())

    def loss_fn(output, target):
        meeting()
        return distilled(teacher, output, target)

    devices = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    with DevicePool() as pool, pipeline(model := teacher_model(), pool).sync() as teacher:
        model.requires_grad_(not frozen)
        options = {"microbatches": 4, "checkpoint": "never", "pool": pool, "loss_fn": loss_fn}
        with (
            Pipeline(workload.model(), devices[0], **options).sync() as one,
            Pipeline(workload.model(), devices[1], **options).sync() as other,
        ):
            step_together(workload, one, other)
            for pipe in (one, other):
                assert_close(gradients(pipe.module), wanted[0])
            if not frozen:
                assert_close(gradients(model), [2 * gradient for gradient in wanted[1]])


@pytest.mark.promise(
    "Your own program",
    "A loss, a stage or a hook may call a pipeline: results are right, and no device waits for itself.",
)
def test_two_pipelines_whose_losses_call_each_other(workload, no_leaks):
    """Each in a pool of its own, both at the same time: waiting for lanes would be waiting in a circle."""
    meeting, calling = Meeting(2), threading.local()

    def loss_fn(other, output, target):
        meeting()
        if getattr(calling, "depth", 0) < 2:
            calling.depth = getattr(calling, "depth", 0) + 1
            try:
                with torch.no_grad():
                    target = target + other()(target[:, :6])
            finally:
                calling.depth -= 1
        return mse(output, target)

    options = {"checkpoint": "never"}
    with (
        pipeline(workload.model(), loss_fn=partial(loss_fn, lambda: two), **options).sync() as one,
        pipeline(workload.model(), loss_fn=partial(loss_fn, lambda: one), **options).sync() as two,
    ):
        step_together(workload, one, two)


class Counts(nn.Module):
    """Scales by how often it was called, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.count += 1
        return x * self.count


def test_two_students_change_buffers_of_one_teacher(workload, no_leaks):
    """One of them runs the stage that has the buffer at a time."""
    inside, most = [], []

    def watch(module, args):
        inside.append(module)
        most.append(len(inside))
        meeting()

    meeting, other = Meeting(1), nn.Sequential(nn.Linear(8, 8).double(), Counts())
    other[1].register_forward_pre_hook(watch)
    other[1].register_forward_hook(lambda *_: inside.clear())
    with DevicePool() as pool, pipeline(other, pool, checkpoint="never").sync() as teacher:
        options = {"microbatches": 4, "checkpoint": "never", "pool": pool, "loss_fn": partial(distilled, teacher)}
        with (
            Pipeline(workload.model(), ["cpu:0", "cpu:1"], **options).sync() as one,
            Pipeline(workload.model(), ["cpu:2", "cpu:3"], **options).sync() as two,
        ):
            buffer = other[1].count
            step_together(workload, one, two)
    assert other[1].count is buffer
    # Each student has 4 micro-batches, of 3 samples, of which the teacher makes 3.
    assert int(buffer) == len(most) == 24
    assert set(most) == {1}


@pytest.mark.promise("Everything ends", "Two stages that would wait for each other's pipelines are refused.")
def test_two_stages_that_wait_for_each_other_are_refused(workload, no_leaks):
    """Each calls the other's pipeline, from inside a stage that has a buffer."""
    meeting, calling = Meeting(2), threading.local()

    class Calls(Counts):
        def forward(self, x):
            meeting()
            if not getattr(calling, "is_inside", False):
                calling.is_inside = True
                try:
                    return super().forward(x) + self.other[0](x)
                finally:
                    calling.is_inside = False
            return super().forward(x)

    models = [nn.Sequential(nn.Linear(6, 6).double(), Calls()) for _ in range(2)]
    options = {"checkpoint": "never", "loss_fn": lambda y: y.sum()}
    with pipeline(models[0], **options).sync() as one, pipeline(models[1], **options).sync() as two:
        models[0][1].other, models[1][1].other = [two], [one]
        results = run_all(*[lambda pipe=pipe: pipe.step(workload.x).loss and None for pipe in (one, two)])
        texts = [str(error) for error in results if isinstance(error, TaskError)]
        assert any("each waits for the buffers of a stage that the other one runs" in text for text in texts)
        models[0][1].other = models[1][1].other = None
        results.clear()


# What cannot run there


def in_loss(function):
    """A loss that calls ``function`` in one micro-batch and keeps what it raises, and where."""

    def loss_fn(output, target):
        if not loss_fn.raised:
            try:
                loss_fn.raised.append(function())
            except Exception as error:  # noqa: BLE001 - told to the test
                loss_fn.raised.append(error)
        return mse(output, target)

    loss_fn.raised = []
    return loss_fn


@pytest.mark.promise("Everything ends", "A step or a close inside a task, which would wait for itself, is refused.")
def test_steps_and_closing_inside_a_task_are_refused(workload, no_leaks):
    refusals = [
        (lambda: pipe.step(workload.x, workload.target), "call the pipeline there"),
        (lambda: other.step(workload.x, workload.target), "call the pipeline there"),
        (lambda: asyncio.run(pipe._pipeline.step(workload.x, workload.target)), "call the pipeline there"),
        (lambda: pipe.close(), "close it when the step is over"),
        (lambda: asyncio.run(pipe._pipeline.aclose()), "close it when the step is over"),
        (lambda: asyncio.run(pool.aclose()), "close it when the step is over"),
    ]
    for function, message in refusals:
        loss_fn = in_loss(function)
        with (
            DevicePool() as pool,
            pipeline(workload.model(), loss_fn=mse).sync() as other,
            pipeline(workload.model(), pool, loss_fn=loss_fn, checkpoint="never").sync() as pipe,
        ):
            pipe.step(workload.x, workload.target)
            assert workload.worst(pipe.module) < 1e-10
        assert isinstance(loss_fn.raised[0], NestedWaitError)
        assert message in str(loss_fn.raised[0])


@pytest.mark.promise("Everything ends", "A step or a close inside a task, which would wait for itself, is refused.")
async def test_a_step_that_a_task_starts_on_the_loop_is_refused(workload, no_leaks):
    """The task waits for a coroutine of the loop that drives the pool."""
    loop = asyncio.get_running_loop()

    def wait():
        return asyncio.run_coroutine_threadsafe(teacher.step(workload.x, workload.target), loop).result(30)

    loss_fn = in_loss(wait)
    async with (
        DevicePool() as pool,
        pipeline(workload.model(), pool, loss_fn=mse) as teacher,
        pipeline(workload.model(), pool, loss_fn=loss_fn, checkpoint="never") as pipe,
    ):
        await pipe.step(workload.x, workload.target)
    assert isinstance(loss_fn.raised[0], NestedWaitError)


class Observes:
    """Calls a function with its first record."""

    def __init__(self, function):
        self.function, self.raised = function, []

    def step_completed(self, record):
        if not self.raised:
            self.raised.append(None)
            try:
                self.raised[0] = self.function()
            except Exception as error:  # noqa: BLE001 - told to the test
                self.raised[0] = error


@pytest.mark.promise("Everything ends", "An observer that would wait for the loop that calls it is refused.")
@pytest.mark.parametrize("what", ["call", "step", "close", "backward"])
def test_an_observer_that_waits_for_its_own_loop_is_refused(workload, what, no_leaks):
    pipe = pipeline(workload.model(), loss_fn=mse).sync()
    waits = {
        "call": lambda: pipe(workload.x),
        "step": lambda: pipe.step(workload.x, workload.target),
        "close": lambda: pipe.close(),
        "backward": lambda: loss[0].backward(),
    }
    loss = []
    with pipe:
        loss.append(pipe(workload.x).sum())
        observer = Observes(waits[what])
        pipe.observers.append(observer)
        pipe.step(workload.x, workload.target)
        assert isinstance(observer.raised[0], NestedWaitError)
        assert "this thread drives the pipeline's steps" in str(observer.raised[0])
        loss.clear()
        observer.raised.clear()


async def test_an_observer_starts_a_step(workload, no_leaks):
    """It is called on the pool's thread, not inside a task, though a task's thread has posted the last event."""
    loop = asyncio.get_running_loop()
    started = loop.create_future()

    def begin():
        started.set_result(asyncio.ensure_future(pipe.step(workload.x, workload.target)))

    def start():
        loop.call_soon_threadsafe(begin)

    async with pipeline(workload.model(), loss_fn=mse, observers=[Observes(start)]) as pipe:
        await pipe.step(workload.x, workload.target)
        await (await started)


def test_errors_inside_name_both_tasks(workload, no_leaks):
    def fail(x):
        raise ValueError("inside the teacher")

    model = teacher_model()
    model[3].register_forward_pre_hook(lambda _, args: fail(args))
    with classroom(workload, model=model) as (_, student):
        with pytest.raises(
            TaskError, match=r"F\(0,1\) failed .* TaskError: F\(0,1\) failed .* ValueError: inside"
        ) as caught:
            student.step(workload.x, workload.target)
        assert isinstance(caught.value.__cause__, TaskError)
        assert isinstance(caught.value.__cause__.__cause__, ValueError)
        assert gradients(student.module) == [None] * len(gradients(student.module))
        del caught


def test_closed_pipelines_are_refused_inside_a_task(workload, no_leaks):
    with DevicePool() as pool:
        teacher = pipeline(teacher_model(), pool).sync()
        with pipeline(workload.model(), pool, loss_fn=partial(distilled, teacher)).sync() as student:
            for message in ("not open", "is closed"):
                with pytest.raises(TaskError) as caught:
                    student.step(workload.x, workload.target)
                assert isinstance(caught.value.__cause__, PipelineClosedError)
                assert message in str(caught.value)
                del caught
                if message == "not open":
                    with teacher:
                        student.step(workload.x, workload.target)


@pytest.mark.promise(
    "Refused, not wrong", "Calls inside a task that would change buffers twice, or deferred batch norms, are refused."
)
def test_deferred_batch_norms_are_refused_inside_a_task(workload, no_leaks):
    other = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    with classroom(workload, model=other, teacher={"deferred_batch_norm": True}) as (teacher, student):
        with pytest.raises(TaskError, match="deferred batch norms gather") as caught:
            student.step(workload.x, workload.target)
        assert isinstance(caught.value.__cause__, OptionError)
        del caught
        teacher.eval()
        student.step(workload.x, workload.target)


def test_a_pool_that_closes_waits_for_what_tasks_call(workload, no_leaks):
    """Closing has begun: a call inside a task is part of the step that it waits for."""
    closing = threading.Event()

    def loss_fn(output, target):
        reached.set()
        assert closing.wait(30)
        return distilled(teacher, output, target)

    reached = threading.Event()
    with (
        DevicePool() as pool,
        pipeline(teacher_model(), pool).sync() as teacher,
        pipeline(workload.model(), pool, loss_fn=loss_fn).sync() as student,
    ):

        def close():
            assert reached.wait(30)
            draining = pool.portal.submit(pool.driver.drain())
            pool.portal.loop.call_soon_threadsafe(closing.set)
            draining.wait()

        assert run_all(lambda: student.step(workload.x, workload.target).loss and None, close) == [None, None]


@pytest.mark.parametrize("whole", [True, False])
def test_a_hook_of_a_parameter_calls_the_pipeline(workload, whole, no_leaks):
    """At the end of a step, on the thread that made it."""
    model, seen = workload.model(), []

    def hook(parameter):
        with torch.no_grad():
            seen.append(pipe(workload.x))

    model[6].weight.register_post_accumulate_grad_hook(hook)
    with pipeline(model, loss_fn=mse).sync() as pipe:
        if whole:
            pipe.step(workload.x, workload.target)
        else:
            mse(pipe(workload.x), workload.target).backward()
        assert len(seen) == 1
        torch.testing.assert_close(seen.pop(), workload.outputs)
        assert workload.worst(model) < 1e-10
    model[6].weight._post_accumulate_grad_hooks.clear()
