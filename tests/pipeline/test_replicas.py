"""Replicas of a pipeline: everything is as with one pipeline that has all micro-batches."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from samples import each_value
from torch import nn

from asyncpipe import Pipeline, pop, skippable, stash
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.kinds import TaskKind
from asyncpipe.errors import OptionError, SharedParameterError, TaskError
from asyncpipe.ops.execute.stage_files import StoredStages

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "backward-first")
MOST = 2
"""Micro-batches of each replica."""


class Head(nn.Module):
    """The first layer's weight once more."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x):
        return x @ self.weight


def make_model(*, norm=True, tie=True) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(4, 8)
    layers = [
        first,
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.BatchNorm1d(8, momentum=None) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Linear(8, 8),
    ]
    return nn.Sequential(*layers, Head(first) if tie else nn.Linear(8, 4)).double()


def batch(step, samples):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 4, generator=generator, dtype=torch.float64)


def counted(output, target):
    """A mean over some of the samples only, with their number."""
    of_sample = (output - target).square().sum(1)
    use = target[:, 0] > -1.0
    return of_sample[use].mean() if use.any() else of_sample.sum() * 0, int(use.sum())


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def rows_of(replicas, stages=2):
    return [[f"cpu:{row * stages + stage}" for stage in range(stages)] for row in range(replicas)]


def opened(model, replicas, microbatches=0, **options):
    """One pipeline with as many micro-batches as the replicas have together, or the replicas."""
    devices = rows_of(replicas) if replicas > 1 else rows_of(1)[0]
    options = {"loss_fn": nn.functional.mse_loss, "schedule": "1f1b"} | options
    return Pipeline(model, devices, microbatches=microbatches or MOST, **options)


async def trained(replicas, microbatches, steps, *, samples, norm=True, update=lambda step: True, **options):
    """Losses, outputs, gradients, and everything in the state, after some steps."""
    model = make_model(norm=norm, tie=options.pop("tie", True))
    found = []
    torch.manual_seed(3)
    async with opened(model, replicas, microbatches, **options) as pipe:
        for step in range(steps):
            result = await pipe.step(*batch(step, samples), update=update(step))
            found += [result.loss.clone(), result.outputs.clone()]
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            if options.get("optimizer") is None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        model.eval()
        with torch.no_grad():
            found.append(pipe.sync()(batch(9, samples)[0]))
        found += [each.double() for each in pipe.state_dict().values()]
        found += [value for state in pipe.optimizer_states().values() for value in state.values()]
    return found


def assert_equal(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.promise("Right results", "Replicas train as one pipeline with all their micro-batches, within 1e-10.")
@each_value(("schedule", SCHEDULES), ("replicas", [2, 2, 3, 3]), ("optimizer", [momentum, None]))
async def test_replicas_train_as_one_pipeline_with_all_micro_batches(schedule, replicas, optimizer):
    microbatches = 4 if schedule in ("zbv", "interleaved") else MOST
    options = {"schedule": schedule, "optimizer": optimizer, "samples": 6 * replicas * microbatches - 1}
    one = await trained(1, microbatches * replicas, 2, **options)
    assert_equal(one, await trained(replicas, microbatches, 2, **options))


@pytest.mark.promise("Right results", "Replicas train as one pipeline with all their micro-batches, within 1e-10.")
@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": counted},
        {"loss_fn": counted, "optimizer": momentum},
        {"deferred_batch_norm": True},
        {"deferred_batch_norm": True, "optimizer": momentum, "checkpoint": "always"},
        {"optimizer": momentum, "checkpoint": "never", "loss_reduction": "sum", "tie": False},
        {"optimizer": momentum, "update": lambda step: step % 2 == 1},
        {"loss_fn": counted, "optimizer": partial(torch.optim.AdamW, lr=0.01), "update": lambda step: step == 2},
        {"optimizer": partial(torch.optim.AdamW, lr=0.01), "shard_optimizer": True},
        {"optimizer": momentum, "shard_optimizer": True, "update": lambda step: step % 2 == 1, "loss_fn": counted},
        {"optimizer": momentum, "shard_optimizer": True, "norm": False, "offload": 0.5, "optimizer_on_host": True},
        pytest.param({"optimizer": momentum, "norm": False, "compile": {"backend": "eager"}}, marks=pytest.mark.long),
    ],
)
async def test_what_a_step_may_have_besides(options):
    one = await trained(1, MOST * 2, 3, samples=27, **options)
    assert_equal(one, await trained(2, MOST, 3, samples=27, **options))


@pytest.mark.promise("Right results", "Replicas train as one pipeline with all their micro-batches, within 1e-10.")
async def test_replicas_without_a_micro_batch_only_update():
    one = await trained(1, 6, 2, samples=2, norm=False, optimizer=momentum)
    assert_equal(one, await trained(3, 2, 2, samples=2, norm=False, optimizer=momentum))


async def test_steps_do_not_overlap_where_a_replica_has_no_micro_batch():
    """Its tasks read what others have made, and nothing of the next step would wait for them."""
    records = []
    async with opened(make_model(norm=False, tie=False), 2, optimizer=momentum) as pipe:
        pipe.observers.append(SimpleNamespace(step_completed=records.append))
        async for _ in pipe.steps([batch(step, samples) for step, samples in enumerate([13, 13, 1, 13])], ahead=3):
            pass
    assert [min(record.graph.rows.microbatches) for record in records] == [2, 2, 0, 2]
    lanes = {task.lane.device for task in records[2].graph.tasks}
    assert len(lanes) == 4
    ends = [max(at for at, _ in record.journal) for record in records]
    begins = [min(at for at, _ in record.journal) for record in records]
    assert ends[1] <= begins[2]
    assert ends[2] <= begins[3]


@pytest.mark.promise(
    "Bit-identical results", "Replicas on threads and in workers are bit-identical, whether steps overlap or not."
)
async def test_steps_of_replicas_overlap_with_the_same_bits():
    found = []
    for ahead in (0, 2):
        model = make_model(norm=False, tie=False)
        torch.manual_seed(3)
        async with opened(model, 2, optimizer=momentum) as pipe:
            assert pipe.why_steps_wait is None
            losses = [result.loss async for result in pipe.steps([batch(step, 13) for step in range(5)], ahead=ahead)]
            found.append([*losses, *pipe.state_dict().values()])
    assert all(map(torch.equal, *found))


@pytest.mark.promise(
    "Right results", "A backward through several calls of a pipeline with replicas has the gradients of one pipeline."
)
@each_value(("calls", [1, 2]), ("optimizer", [momentum, None]))
def test_a_backward_of_the_callers_own_gathers_all_gradients(optimizer, calls):
    found = []
    for replicas in (1, 2):
        model = make_model(norm=False)
        torch.manual_seed(3)
        x, target = batch(0, 13)
        x.requires_grad_()
        pieces = MOST * 2 // replicas
        with opened(model, replicas, pieces, optimizer=optimizer).sync() as pipe:
            for _ in range(2):
                sum(nn.functional.mse_loss(pipe(x), target) for _ in range(calls)).backward()
        found.append([x.grad, *[each.grad for each in model.parameters()]])
    assert_equal(*found)


@pytest.mark.parametrize("options", [{"optimizer": momentum}, {"optimizer": momentum, "shard_optimizer": True}, {}])
async def test_what_the_caller_changes_between_steps_reaches_all_replicas(options):
    found = []
    for replicas in (1, 2):
        model = make_model(tie=False)
        torch.manual_seed(3)
        async with opened(model, replicas, MOST * 2 // replicas, **options) as pipe:
            await pipe.step(*batch(0, 27))
            state = {name: value.clone() for name, value in pipe.state_dict().items()}
            optimizers = {name: dict(state) for name, state in copy.deepcopy(pipe.optimizer_states()).items()}
            for step in range(2):
                await pipe.step(*batch(step, 27))
            pipe.load_state_dict(state)
            if optimizers:
                pipe.load_optimizer_states(optimizers)
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            model[3].weight.requires_grad_(requires_grad=False)
            model.eval()
            with torch.no_grad():
                evaluated = (await pipe.step(*batch(5, 27))).loss
            model.train()
            for step in range(2):
                model.zero_grad()
                last = await pipe.step(*batch(step, 27))
            found.append([evaluated, last.loss, *[each.double() for each in pipe.state_dict().values()]])
    assert_equal(*found)


async def test_a_failed_step_of_replicas_leaves_everything_as_it_was():
    model = make_model(norm=False, tie=False)
    seen = []

    def loss_fn(output, target):
        seen.append(None)
        if len(seen) == 3:
            raise ValueError("of a later replica")
        return nn.functional.mse_loss(output, target)

    async with opened(model, 2, loss_fn=loss_fn, schedule="gpipe") as pipe:
        model[0].weight.grad = torch.ones_like(model[0].weight)
        with pytest.raises(TaskError, match="of a later replica"):
            await pipe.step(*batch(0, 13))
        assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
        assert model[3].weight.grad is None
        await pipe.step(*batch(0, 13))


def test_gradients_are_reduced_on_a_lane_of_their_own():
    graph = opened(make_model(norm=False, tie=False), 2, optimizer=momentum).graph
    reduces = [task for task in graph.tasks if task.kind is TaskKind.REDUCE]
    assert [task.id for task in reduces] == ["A(0,0)", "A(2,0)", "A(1,0)", "A(3,0)"]
    assert {task.lane.queue for task in reduces} == {Queue.REDUCE}
    alone = opened(make_model(norm=False, tie=False), 1, optimizer=momentum).graph
    assert Queue.REDUCE not in {lane.queue for lane in alone.lanes}


@skippable(stash=["kept"])
class Keeps(nn.Module):
    def forward(self, x):
        yield stash("kept", x)
        return x.tanh()


@skippable(pop=["kept"])
class Adds(nn.Module):
    def forward(self, x):
        kept = yield pop("kept")
        return x + kept


@pytest.mark.parametrize("optimizer", [momentum, None])
def test_values_that_skip_stages_and_scaled_losses(optimizer):
    found = []
    for replicas in (1, 2):
        torch.manual_seed(3)
        layers = [Keeps(), nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4), Adds(), nn.Linear(4, 4)]
        model = nn.Sequential(*layers).double()
        own = None if optimizer else torch.optim.SGD(model.parameters(), 0.1)
        scaler = None if optimizer else torch.amp.GradScaler("cpu", init_scale=1024.0)
        with opened(model, replicas, MOST * 2 // replicas, optimizer=optimizer, balance=[3, 3]).sync() as pipe:
            for step in range(2):
                pipe.step(*batch(step, 27), scaler=scaler)
                if own is not None:
                    scaler.unscale_(own)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(own)
                    scaler.update()
                    own.zero_grad()
        found.append(list(model.state_dict().values()))
    assert_equal(*found)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.promise(
    "Refused, not wrong", "Rows of devices of different lengths, and buffers that replicas cannot share, are refused."
)
@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_other_buffers_that_forwards_change_are_refused(mode):
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4)).double().train(mode == "train")
    async with opened(model, 2) as pipe:
        with pytest.raises(TaskError, match="each of the 2 replicas would change its own") as caught:
            await pipe.step(*batch(0, 13))
    assert isinstance(caught.value.__cause__, SharedParameterError)


@pytest.mark.promise(
    "Refused, not wrong", "Rows of devices of different lengths, and buffers that replicas cannot share, are refused."
)
@pytest.mark.parametrize(
    ("devices", "replicas", "match"),
    [
        ([["cpu:0", "cpu:1"], ["cpu:2"]], 1, "a list of as many devices"),
        ([["cpu:0"], "cpu:1"], 1, "a list of as many devices"),
        ([["cpu:0"], ["cpu:1"]], 3, "replicas=3 does not go with 2 lists"),
        (["cpu:0", "cpu:1", "cpu:2"], 2, "2 replicas cannot share 3 devices"),
        (["cpu:0"], 0, "replicas must be a positive integer"),
    ],
)
def test_devices_that_are_not_rows_are_refused(devices, replicas, match):
    with pytest.raises(OptionError, match=match):
        Pipeline(make_model(), devices, microbatches=2, replicas=replicas)


@pytest.mark.promise("Your own program", "With replicas, hooks of parameters see the whole gradient once.")
@pytest.mark.parametrize("optimizer", [momentum, None])
async def test_hooks_of_parameters_see_the_whole_gradient_once(optimizer):
    found = []
    for replicas in (1, 2):
        model, first, second = make_model(norm=False, tie=False), [], []
        torch.manual_seed(3)
        model[3].weight.register_hook(lambda grad, seen=first: seen.append(grad.clone()) or grad * 0.5)
        model[7].bias.register_post_accumulate_grad_hook(lambda p, seen=second: seen.append(p.grad.clone()))
        async with opened(model, replicas, MOST * 2 // replicas, optimizer=optimizer) as pipe:
            await pipe.step(*batch(0, 27), update=False)
            await pipe.step(*batch(1, 27))
        found.append([*first, *second, *model.state_dict().values()])
        assert len(first) == len(second) == 2
    assert_equal(*found)


async def test_a_gradient_that_only_an_earlier_step_has_made_is_used():
    found = []
    for replicas in (1, 2):
        model = make_model(norm=False, tie=False)
        torch.manual_seed(3)
        async with opened(model, replicas, MOST * 2 // replicas, optimizer=momentum) as pipe:
            await pipe.step(*batch(0, 27), update=False)
            model[3].weight.requires_grad_(requires_grad=False)
            await pipe.step(*batch(1, 27))
        found.append(list(model.state_dict().values()))
    assert_equal(*found)


@pytest.mark.promise("Memory", "With `shard_optimizer`, each replica has only the states of its part.")
async def test_each_replica_has_a_part_of_the_optimizers_states():
    model = make_model(norm=False, tie=False)
    async with opened(model, 2, optimizer=torch.optim.Adam, shard_optimizer=True) as pipe:
        await pipe.step(*batch(0, 27))
        sizes = [
            sum(state["exp_avg"].numel() for state in each.state.values())
            for each in pipe._parts.resources.optimizers.values()
        ]
        whole = [sum(p.numel() for p in stage.module.parameters()) for stage in pipe.stages]
        assert sizes == [whole[0] // 2, whole[1] // 2] * 2
        states = pipe.optimizer_states()
    assert {name: state["exp_avg"].shape for name, state in states.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, so it needs all of a parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


@pytest.mark.promise(
    "Refused, not wrong", "An optimizer that does not update each element alone cannot be sharded and is refused."
)
@pytest.mark.parametrize(
    ("optimizer", "match"),
    [(partial(Normed, lr=0.1), "Normed does not update each element alone"), (torch.optim.LBFGS, "LBFGS failed on")],
)
def test_an_optimizer_that_cannot_be_sharded_is_refused(optimizer, match):
    with pytest.raises(OptionError, match=match):
        opened(make_model(norm=False), 2, optimizer=optimizer, shard_optimizer=True)


def test_an_own_optimizer_that_updates_each_element_alone_is_sharded():
    class Own(torch.optim.SGD):
        pass

    opened(make_model(norm=False), 2, optimizer=partial(Own, lr=0.1), shard_optimizer=True)


async def on_pool(pool, **options):
    """Losses, outputs and the state after some steps on threads or in the workers of a pool."""
    model, found = make_model(norm=options.pop("norm", True), tie=options.pop("tie", True)), []
    torch.manual_seed(3)
    async with opened(model, 2, pool=pool, **options) as pipe:
        for step in range(3):
            result = await pipe.step(*batch(step, 27), update=step > 0)
            found += [result.loss, result.outputs]
            found += result.gradient_norms.values()
        found += [each.double() for each in pipe.state_dict().values()]
    return found


@pytest.mark.promise(
    "Bit-identical results", "Replicas on threads and in workers are bit-identical, whether steps overlap or not."
)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": momentum, "loss_fn": counted, "deferred_batch_norm": True},
        {"optimizer": momentum, "loss_fn": counted, "norm": False, "shard_optimizer": True, "tie": False},
        {"optimizer": partial(torch.optim.AdamW, lr=0.01), "shard_optimizer": True, "tie": False},
        {"optimizer": momentum, "gradient_dtype": "bfloat16", "tie": False},
    ],
)
async def test_replicas_in_workers_have_the_bits_of_those_on_threads(options, pool):
    threads, processes = [await on_pool(where, **options) for where in (None, pool)]
    is_same = [torch.equal(one, other) for one, other in zip(threads, processes, strict=True)]
    assert is_same == [True] * len(threads)


def remembered(states):
    return [value for state in states.values() for value in state.values()]


@pytest.mark.parametrize("shard_optimizer", [False, True])
async def test_states_of_replicas_in_workers_are_given_and_taken(shard_optimizer, pool, tmp_path):
    """Loaded from a caller's dicts, or read from the files that workers write, also by other replicas."""
    options = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "shard_optimizer": shard_optimizer, "tie": False}
    found, tie = [], options.pop("tie")
    for where in (None, pool):
        model = make_model(norm=False, tie=tie)
        torch.manual_seed(3)
        async with opened(model, 2, pool=where, **options) as pipe:
            await pipe.step(*batch(0, 27))
            state = copy.deepcopy(pipe.state_dict())
            states = copy.deepcopy(pipe.optimizer_states())
            await pipe.step(*batch(1, 27))
            pipe.load_state_dict(state)
            pipe.load_optimizer_states(states)
            last = await pipe.step(*batch(2, 27))
            found.append([last.loss, *pipe.state_dict().values(), *remembered(pipe.optimizer_states())])
            if pipe.remote is not None:
                pipe.remote.copy_stages()
                names = pipe.remote.write_copies(tmp_path)
    assert all(map(torch.equal, *found))
    assert sorted(names) == sorted(
        [f"model-{j}.pt" for j in range(2)] + [f"optimizer-{v}.pt" for v in range(4 if shard_optimizer else 2)]
    )
    stored = StoredStages([tmp_path / f"model-{j}.pt" for j in range(2)], sorted(tmp_path.glob("optimizer-*.pt")))
    for replicas, shards in [(2, not shard_optimizer), (1, False)]:
        options["shard_optimizer"] = shards
        async with opened(make_model(norm=False, tie=tie), replicas, pool=pool, **options) as pipe:
            pipe.remote.read_stages(stored)
            read = [*pipe.state_dict().values(), *remembered(pipe.optimizer_states())]
            assert all(map(torch.equal, read, found[0][1:]))
            await pipe.step(*batch(3, 27))


async def test_norms_of_gradients_are_those_of_whole_stages():
    found = []
    for shard_optimizer in (False, True):
        options = {"optimizer": momentum, "gradient_norms": True, "shard_optimizer": shard_optimizer}
        async with opened(make_model(norm=False, tie=False), 2, **options) as pipe:
            found.append((await pipe.step(*batch(0, 27))).gradient_norms)
    whole, joined = found
    assert list(whole) == list(joined) == [0, 1]
    assert_equal(list(whole.values()), list(joined.values()))


async def test_a_parameter_with_other_memory_is_updated_by_all():
    found = []
    for replicas in (1, 2):
        model = make_model(norm=False, tie=False)
        torch.manual_seed(3)
        options = {"optimizer": momentum, "shard_optimizer": replicas > 1}
        async with opened(model, replicas, MOST * 2 // replicas, **options) as pipe:
            await pipe.step(*batch(0, 27))
            model[3].weight.data = model[3].weight.detach() * 0.5
            for step in range(2):
                await pipe.step(*batch(step, 27))
        found.append(list(model.state_dict().values()))
    assert_equal(*found)


def test_a_copy_of_replicas_goes_on_as_they_do():
    one = opened(make_model(norm=False, tie=False), 2, optimizer=momentum, shard_optimizer=True)
    torch.manual_seed(3)
    with one.sync() as pipe:
        pipe.step(*batch(0, 27))
        other = copy.deepcopy(one)
        state = torch.get_rng_state()
        pipe.step(*batch(1, 27))
    torch.set_rng_state(state)
    with other.sync() as pipe:
        pipe.step(*batch(1, 27))
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.promise(
    "Right results",
    'With `gradient_dtype="bfloat16"`, gradients of replicas are rounded once and added in the parameter type.',
)
@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
async def test_gradients_that_travel_in_bfloat16_are_rounded(shards):
    found = []
    for replicas in (1, 2):
        model = make_model(norm=False, tie=False)
        before = [each.clone() for each in model.parameters()]
        torch.manual_seed(3)
        options = {"optimizer": partial(torch.optim.SGD, lr=1.0), "gradient_dtype": "bfloat16"}
        async with opened(model, replicas, MOST * 2 // replicas, shard_optimizer=shards, **options) as pipe:
            await pipe.step(*batch(0, 28))
        found.append([old - new.detach() for old, new in zip(before, model.parameters(), strict=True)])
    for exact, rounded in zip(*found, strict=True):
        off = (exact - rounded).abs().max()
        # Half of the last of 8 binary digits, of each replica's share.
        assert 0 < off < 2 * exact.abs().max() * 2.0**-8


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"gradient_dtype": "float16", "optimizer": momentum},
            "gradient_dtype must be one of 'bfloat16', got 'float16'",
        ),
        ({"gradient_dtype": "bfloat16"}, "gradient_dtype is for the pipeline's own optimizers"),
    ],
)
def test_other_types_and_optimizers_are_refused(options, match):
    with pytest.raises(OptionError, match=match):
        opened(make_model(), 2, **options)
