"""Stages that shard themselves over a group of workers: the numbers of the unsplit model, and an end to failures."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, StageFactory
from asyncpipe.errors import OptionError, ScheduleError, TaskError, WorkerLostError

pytestmark = [pytest.mark.timeout(120)]

mse = nn.functional.mse_loss
WIDTH = 8
PLACES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


class Block(nn.Module):
    """Half of a transformer's layer, which may be told to fail where its worker has a rank."""

    def __init__(self, folder: str = "", *, bare: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.bare = bare
        """Whether collectives make what it sends, and the gradient of what it receives."""
        self.folder = folder
        self.rank = -1

    def forward(self, x):
        path = Path(self.folder, str(self.rank))
        order = path.read_text() if self.folder and path.exists() else ""
        if order == "fail":
            raise ValueError("no more")
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.bare:
            return self.down(torch.relu(self.up(x)))
        y = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        if order == "wait":
            Path(self.folder, "begun").write_text("")
            Path(self.folder, "go").read_text()
        return y


def make(stage, folder="", *, bare=False):
    return Block(folder, bare=bare).double()


def tensor_parallel(module, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    module.rank = mesh.get_local_rank()


def fully_sharded(module, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)


def by_hand(module, mesh):
    module.up.weight = nn.Parameter(module.up.weight.chunk(2)[mesh.get_local_rank()])


def returns_sharded(module, mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    module.register_forward_hook(lambda _, __, output: distribute_tensor(output, mesh, [Replicate()]))


def factory(shard=tensor_parallel, *, stages=2, **arguments):
    group = {} if shard is None else {"group": 2, "shard": shard}
    return StageFactory(make, stages=stages, seed=5, arguments=arguments, **group)


def batch(samples=11):
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, samples, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def counted(output, target):
    """A mean over some of the samples only, with their number."""
    use = target[:, 0] > -1.0
    return mse(output[use], target[use]), int(use.sum())


def opened(made, pool=None, devices=PLACES, **options):
    torch.manual_seed(3)
    options = {"loss_fn": counted, "optimizer": partial(torch.optim.Adam, lr=0.01), "schedule": "1f1b"} | options
    return Pipeline(made, devices, microbatches=3, pool=pool, gradient_norms=True, **options)


async def trained(pipe, steps=3):
    """Everything that some steps leave, in one row."""
    found = []
    async with pipe:
        for step in range(steps):
            result = await pipe.step(*batch(), update=step != 1)
            found += [result.loss, *result.losses, result.outputs, *result.gradient_norms.values()]
        pipe.eval()
        found += [(await pipe.step(*batch())).loss]
        pipe.train()
        found += [(await pipe.step(*batch())).loss]
        states = pipe.optimizer_states()
        found += pipe.state_dict().values()
        found += [value for state in states.values() for value in state.values()]
        return [value.clone() for value in found]


@pytest.mark.promise(
    "Right results",
    "Clipping, learning rates and parameter groups inside the step give the numbers of torch on the unsplit model.",
)
@pytest.mark.promise(
    "Right results", "Stages that shard themselves have the numbers of the unsplit stages within 1e-10."
)
@pytest.mark.parametrize(
    ("shard", "schedule"),
    [(tensor_parallel, "1f1b"), (tensor_parallel, "zb-h1"), (fully_sharded, "1f1b"), (fully_sharded, "interleaved")],
)
async def test_the_numbers_are_those_of_the_unsplit_model(pool, shard, schedule):
    stages = 4 if schedule == "interleaved" else 2
    bare = schedule == "zb-h1"
    options = {"schedule": schedule, "clip_grad_norm": None if schedule == "1f1b" else 0.05}
    wanted = await trained(opened(factory(None, stages=stages, bare=bare), devices=PLACES[:2], **options))
    found = await trained(opened(factory(shard, stages=stages, bare=bare), pool, **options))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.promise("Killed and resumed", "States of stages that shard themselves are whole and load into any split.")
async def test_states_are_whole_and_load_into_any_split(pool, tmp_path):
    async with opened(factory(), pool) as pipe:
        await pipe.step(*batch())
        state, states = pipe.state_dict(), pipe.optimizer_states()
        for layout in ("safetensors", "dcp"):
            await pipe.save(tmp_path / layout, format=layout)
        assert state["0.up.weight"].shape == states["0.up.weight"]["exp_avg"].shape == (2 * WIDTH, WIDTH)
        wanted = (await pipe.step(*batch())).loss
    for made, where, devices in ((factory(), pool, PLACES), (factory(None), None, PLACES[:2])):
        async with opened(made, where, devices) as pipe:
            await pipe.step(*batch())
            pipe.load_state_dict(state)
            pipe.load_optimizer_states(states)
            torch.testing.assert_close((await pipe.step(*batch())).loss, wanted, rtol=1e-10, atol=1e-10)

    for layout, place in (("safetensors", (factory(), pool)), ("dcp", (factory(), pool)), ("dcp", (factory(None),))):
        async with opened(*place, **({} if len(place) > 1 else {"devices": PLACES[:2]})) as pipe:
            await pipe.step(*batch())
            await pipe.load(tmp_path / layout)
            torch.testing.assert_close((await pipe.step(*batch())).loss, wanted, rtol=1e-10, atol=1e-10)


def make_batch(step):
    return batch(9 + step)


@pytest.mark.promise("Right results", "A feed makes the same mini-batch in all workers of a group.")
async def test_a_feed_makes_the_same_in_all_workers_of_a_group(pool):
    async with opened(factory(), pool, feed=f"{__name__}:make_batch") as pipe:
        found = [(await pipe.step()).loss for _ in range(2)]
    async with opened(factory(None), devices=PLACES[:2]) as pipe:
        for step, loss in enumerate(found):
            torch.testing.assert_close((await pipe.step(*make_batch(step))).loss, loss, rtol=1e-10, atol=1e-10)


@pytest.mark.promise(
    "A lost worker", "If a worker of a group hangs, that worker is killed, not those that wait for it."
)
@pytest.mark.long
async def test_a_worker_that_hangs_is_the_one_that_is_killed(tmp_path):
    for name in ("begun", "go"):
        os.mkfifo(tmp_path / name)
    made = factory(folder=str(tmp_path))
    async with opened(made, workers="processes", hang_seconds=2.0) as pipe:
        await pipe.step(*batch())
        (tmp_path / "1").write_text("wait")
        step = asyncio.create_task(pipe.step(*batch()))
        await asyncio.to_thread((tmp_path / "begun").read_text)
        with pytest.raises(WorkerLostError, match=r"worker 'cpu:1' was killed by its controller"):
            await step


@pytest.mark.promise(
    "A step that fails",
    "A task that fails in one worker of a group ends the step in all of them, and the next step is right.",
)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_failure_in_one_worker_ends_the_step_in_all(pool, tmp_path, rank):
    async with opened(factory(folder=str(tmp_path)), pool) as pipe:
        await pipe.step(*batch())
        (tmp_path / str(rank)).write_text("fail")
        for _ in range(2):
            with pytest.raises(TaskError, match=r"F\(0,0\) failed .* ValueError: no more"):
                await pipe.step(*batch())
        (tmp_path / str(rank)).unlink()
        pipe.eval()
        found = (await pipe.step(*batch())).loss
    async with opened(factory(None), devices=PLACES[:2]) as pipe:
        await pipe.step(*batch())
        pipe.eval()
        torch.testing.assert_close((await pipe.step(*batch())).loss, found, rtol=1e-10, atol=1e-10)


@pytest.mark.promise("Everything ends", "A cancelled step ends where workers of a group wait in a collective.")
async def test_a_cancelled_step_ends_where_the_others_wait_in_a_collective(pool, tmp_path):
    async with opened(factory(folder=str(tmp_path)), pool) as pipe:
        await pipe.step(*batch())
        for name in ("begun", "go"):
            os.mkfifo(tmp_path / name)
        (tmp_path / "1").write_text("wait")
        step = asyncio.create_task(pipe.step(*batch()))
        await asyncio.to_thread((tmp_path / "begun").read_text)
        step.cancel()
        await asyncio.sleep(0)
        (tmp_path / "1").unlink()
        await asyncio.to_thread((tmp_path / "go").write_text, "")
        with pytest.raises(asyncio.CancelledError):
            await step
        assert (await pipe.step(*batch())).loss.isfinite()


@pytest.mark.promise("A lost worker", "A killed worker of a group ends the step with an error that names it.")
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_worker_of_a_group_that_is_killed(tmp_path, rank):
    async with opened(factory(folder=str(tmp_path), stages=1), devices=PLACES[:2], workers="processes") as pipe:
        await pipe.step(*batch())
        (tmp_path / str(rank)).write_text("die")
        with pytest.raises(WorkerLostError, match=rf"cpu:{rank}"):
            await pipe.step(*batch())


@pytest.mark.promise("Refused, not wrong", "Options that do not work with groups are refused by name.")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"workers": "threads", "schedule": "gpipe"},
            OptionError,
            "a process of its own, .*; give workers='processes'",
        ),
        ({"devices": PLACES[:3]}, OptionError, "3 devices are no multiple of 2"),
        ({"workers": {"cpu:0": "a", "cpu:1": "a", "cpu:2": "b", "cpu:3": "b"}}, OptionError, "a worker of its own"),
        ({"devices": [PLACES[:2], PLACES[2:]]}, OptionError, "with which replicas does not work"),
        ({"compile": True}, OptionError, "with which compile does not work"),
        ({"offload": 0.5}, OptionError, "with which offload does not work"),
        ({"optimizer_on_host": True}, OptionError, "with which optimizer_on_host does not work"),
        ({"order": "hint"}, ScheduleError, "take their collectives in one order; use an ordered schedule"),
        ({"schedule": "backward-first"}, ScheduleError, "take their collectives in one order"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_work_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        opened(factory(), **{"workers": "processes"} | options)


@pytest.mark.promise("Refused, not wrong", "Options that do not work with groups are refused by name.")
@pytest.mark.parametrize(("group", "shard"), [(2, None), (1, tensor_parallel)])
def test_group_and_shard_come_together(group, shard):
    with pytest.raises(OptionError, match="give StageFactory both group and shard, or neither"):
        StageFactory(make, stages=2, group=group, shard=shard)


@pytest.mark.promise("Refused, not wrong", "Options that do not work with groups are refused by name.")
@pytest.mark.parametrize(
    ("shard", "schedule", "error", "message"),
    [
        (by_hand, "1f1b", OptionError, r"'up.weight' of shape \(16, 8\) one of shape \(8, 8\).*make it a DTensor"),
        (fully_sharded, "zb-h1", ScheduleError, "fully_shard, which frees its weights .* splits backwards"),
    ],
)
async def test_what_cannot_be_sharded_is_refused_by_the_workers(pool, shard, schedule, error, message):
    with pytest.raises(error, match=message):
        async with opened(factory(shard), pool, schedule=schedule):
            pass


@pytest.mark.promise("Refused, not wrong", "Options that do not work with groups are refused by name.")
async def test_what_comes_later_is_refused_too(pool):
    async with opened(factory(fully_sharded), pool) as pipe:
        assert "in the order of one step" in pipe.why_steps_wait
        for schedule, message in (("zb-h1", "splits backwards"), ("backward-first", "in one order")):
            with pytest.raises(ScheduleError, match=message):
                pipe.change_schedule(schedule)
        with pytest.raises(OptionError, match=r"pipe\(x\), whose loss and backward are the caller's"):
            pipe(batch()[0])
        await pipe.step(*batch())
        with pytest.raises(OptionError, match="has a default process group already"):
            async with opened(factory(), pool):
                pass
        await pipe.step(*batch())


@pytest.mark.promise("Refused, not wrong", "Options that do not work with groups are refused by name.")
async def test_a_stage_that_returns_a_dtensor(pool):
    async with opened(factory(returns_sharded), pool) as pipe:
        with pytest.raises(
            TaskError, match=r"stage 0, which shards itself, returns a DTensor.*return its to_local\(\)"
        ):
            await pipe.step(*batch())
