"""A run among others on shared devices: the numbers that it would have had alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import numpy
import pytest
import torch
from resume_helpers import STEPS, assert_same, batches, disturb
from run_helpers import LOADED, Told, assert_same_end, beside_others, job_of, plain
from torch import Generator, Tensor, nn
from torch.nn import functional

from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Forward, Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("kind", LOADED)
@pytest.mark.parametrize("first", ["alone", "among others"])
async def test_a_run_goes_on_with_the_same_bits_alone_and_among_others(tmp_path, kind, first):
    async def run(told: Told, folder: Path, *, alone: bool) -> Any:
        disturb()
        if alone:
            return await TrainingRun(job_of(folder), LOADED[kind], progress=told).run()
        return await beside_others(job_of(folder), LOADED[kind], told, folder.with_name("others"))

    whole, went_on = Told(), Told()
    summary = await run(whole, tmp_path / "whole", alone=True)
    async with DevicePool() as pool:
        begun = TrainingRun(
            job_of(tmp_path / "parts"),
            LOADED[kind],
            progress=Told(lambda step: step == 3 and begun.orders.stop()),
            pool=None if first == "alone" else pool,
        )
        await begun.run()
    again = await run(went_on, tmp_path / "parts", alone=first != "alone")
    assert went_on.losses == whole.losses[3:]
    assert_same_end(again.snapshot, summary.snapshot)


async def test_what_belongs_to_the_process_is_neither_kept_nor_put_back(tmp_path):
    disturb()

    def drawn() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), numpy.random.standard_normal()]

    wanted = drawn()
    disturb()
    async with DevicePool() as pool:
        told = Told(lambda step: step == 3 and run.orders.stop())
        run = TrainingRun(job_of(tmp_path), plain, pool=pool, progress=told)
        await run.run()
        assert list(read_snapshot(tmp_path / "step-3").states["run"]["random"]) == ["cpu"]
        await TrainingRun(job_of(tmp_path), plain, pool=pool).run()
    assert drawn() == wanted


@pytest.mark.parametrize("begun", [0, 2])
async def test_a_run_on_a_pool_that_is_stopped_while_it_is_made_keeps_its_step(tmp_path, begun):
    if begun:
        first = TrainingRun(job_of(tmp_path), plain, progress=Told(lambda step: step == begun and first.orders.stop()))
        await first.run()

    def make() -> Workload:
        run.orders.stop()
        return plain()

    async with DevicePool() as pool:
        # Where it has not begun, there are not so many layers, but nobody looks any more.
        run = TrainingRun(job_of(tmp_path, devices=2 if begun else 9), make, pool=pool)
        summary = await run.run()
    assert (summary.steps, summary.stopped) == (begun, True)
    assert summary.snapshot == (tmp_path / "step-2" if begun else None)


async def test_a_run_is_stopped_between_two_rounds_of_its_measurements(tmp_path):
    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            run.orders.stop()
            return super().forward(x)

    def make() -> Workload:
        return replace(plain(), model=nn.Sequential(Watched(3, 8), nn.Linear(8, 3)).double())

    async with DevicePool() as pool:
        job = job_of(tmp_path).override("pipeline", schedule="auto")
        run = TrainingRun(job, make, pool=pool)
        assert (await run.run()).steps == 0


async def test_an_entry_that_takes_its_time_holds_up_no_other_run(tmp_path):
    reached, go_on = Event(), Event()

    def make() -> Workload:
        reached.set()
        assert go_on.wait(30)
        return plain()

    async with DevicePool() as pool:
        # More of them than the loop's pool has threads.
        slow = [
            asyncio.ensure_future(TrainingRun(job_of(tmp_path / f"slow-{n}"), make, pool=pool).run()) for n in range(40)
        ]
        await asyncio.to_thread(reached.wait)
        summary = await TrainingRun(job_of(tmp_path / "mine"), plain, pool=pool).run()
        assert summary.steps == STEPS
        assert not any(run.done() for run in slow)
        for _ in range(3):
            for run in slow:
                run.cancel()
            await asyncio.sleep(0)
        assert not any(run.done() for run in slow)
        go_on.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_held_out_batches_are_made_in_the_runs_thread_and_its_sampler_draws_its_numbers(tmp_path):
    threads: list[str] = []

    def held_out(batch_size: int) -> Iterator[Batch]:
        threads.append(current_thread().name)
        yield next(batches(batch_size, Generator().manual_seed(1)))

    async def sample(forward: Forward) -> str:
        drawn = [torch.rand(()).item()]
        await forward(torch.ones(1, 3, dtype=torch.float64))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(failing(), 1)
        return repr([*drawn, torch.rand(()).item()])

    async def failing() -> None:
        raise ZeroDivisionError

    def make() -> Workload:
        return replace(plain(), held_out=held_out, sample=sample)

    alone = await TrainingRun(job_of(tmp_path / "alone"), make).run()
    among = await beside_others(job_of(tmp_path / "among"), make, Told(), tmp_path)
    assert (among.evaluation, among.sample) == (alone.evaluation, alone.sample)
    assert all(name.startswith("asyncpipe-linear") for name in threads)


# What the entry draws


def made() -> list[Tensor]:
    """What entries make, by all that draws."""
    layers: list[nn.Module] = [
        nn.Linear(30, 40), nn.Embedding(50, 20), nn.MultiheadAttention(16, 4), nn.LSTM(5, 7, 2), nn.Conv2d(3, 8, 3),
        nn.TransformerEncoderLayer(16, 4), nn.Bilinear(3, 4, 5), nn.ConvTranspose1d(3, 4, 2), nn.EmbeddingBag(9, 3),
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)),
    ]  # fmt: skip
    values = [value.detach() for layer in layers for value in layer.state_dict().values()]
    fill, init = torch.empty(20, 30), nn.init
    for fill_with in (
        init.orthogonal_, init.xavier_normal_, init.xavier_uniform_, init.trunc_normal_, init.kaiming_normal_,
        init.kaiming_uniform_, init.normal_, init.uniform_, lambda x: init.sparse_(x, 0.3), Tensor.exponential_,
        Tensor.random_, Tensor.log_normal_, Tensor.cauchy_,
    ):  # fmt: skip
        fill_with(fill)
        values.append(fill.clone())
    values += [
        torch.rand(3), torch.randn(100, device="cpu:0"), torch.randint(5, (4,)), torch.randperm(20),
        torch.rand_like(fill), torch.normal(fill.sigmoid(), 1.0), torch.normal(0.0, 1.0, (4,)),
        torch.multinomial(torch.ones(9), 4), torch.poisson(torch.ones(7)), functional.dropout(fill, 0.3),
        functional.gumbel_softmax(fill), functional.rrelu(-fill, training=True),
        torch.distributions.Dirichlet(torch.ones(4)).sample(), torch.distributions.Gamma(2.0, 1.0).sample((3,)),
    ]  # fmt: skip
    return [*values, *torch.utils.data.DataLoader(torch.arange(20), shuffle=True, batch_size=20)]


def test_what_an_entry_draws_is_what_it_draws_alone_and_nobody_else_notices():
    torch.manual_seed(7)
    wanted, behind = made(), torch.get_rng_state()
    disturb()
    outside = torch.get_rng_state()
    numbers = RunRandom(shared=True)
    assert_same(numbers.build(7, made), wanted)
    assert torch.equal(numbers.position, behind)
    assert torch.equal(torch.get_rng_state(), outside)
