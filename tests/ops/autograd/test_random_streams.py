"""Random streams: draws depend on seed, micro-batch and stage only, and do not change torch's own generators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import asyncpipe
from asyncpipe.ops.autograd import random_streams as random_module
from asyncpipe.ops.autograd.checkpoint import checkpoint
from asyncpipe.ops.autograd.random_streams import RandomStream, draw_step_seed

CPU = torch.device("cpu")
LSTM, ATTENTION = nn.LSTM(4, 4, 2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5)
ENCODER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
SEQUENCE = torch.arange(24.0).reshape(3, 2, 4) / 24

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(5),
    "rand, keyword": lambda: torch.rand(size=(5,), dtype=torch.float64),
    "rand, out": lambda: torch.rand(5, out=torch.empty(5)),
    "randn_like": lambda: torch.randn_like(SEQUENCE),
    "randint": lambda: torch.randint(0, 1000, (5,)),
    "randperm": lambda: torch.randperm(50),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "method in place": lambda: torch.empty(5).uniform_(),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "normal": lambda: torch.normal(0.0, torch.ones(5)),
    "poisson": lambda: torch.poisson(torch.full((50,), 3.0)),
    "aten": lambda: torch.ops.aten.rand([5]),
    "dropout": lambda: F.dropout(torch.ones(50)),
    "dropout module": lambda: nn.Dropout(0.5)(torch.ones(50)),
    "dropout in place": lambda: nn.Dropout(0.5, inplace=True)(torch.ones(50)),
    "dropout2d": lambda: nn.Dropout2d(0.5)(torch.ones(2, 30, 2, 2)),
    "alpha dropout": lambda: nn.AlphaDropout(0.5)(torch.ones(50)),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.5)(torch.ones(2, 30, 2, 2)),
    "rrelu": lambda: nn.RReLU()(-torch.ones(50)),
    "fractional pooling": lambda: nn.FractionalMaxPool2d(2, output_size=8)(torch.arange(1600.0).reshape(1, 4, 20, 20)),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(50)),
    "lstm": lambda: LSTM(SEQUENCE)[0],
    "attention": lambda: F.scaled_dot_product_attention(SEQUENCE, SEQUENCE, SEQUENCE, dropout_p=0.5),
    "attention, positional": lambda: F.scaled_dot_product_attention(SEQUENCE, SEQUENCE, SEQUENCE, None, 0.5),
    "multi-head attention": lambda: ATTENTION(SEQUENCE, SEQUENCE, SEQUENCE)[0],
    "encoder layer": lambda: ENCODER(SEQUENCE),
    "distributions": lambda: torch.distributions.Dirichlet(torch.ones(5)).rsample(),
    "weight initialisation": lambda: nn.init.trunc_normal_(torch.empty(5)),
    "initialisation that torch lets be overridden": lambda: nn.init.kaiming_uniform_(torch.empty(5, 5)),
}


def stream(seed: int = 1, microbatch: int = 0, stage: int = 0) -> RandomStream:
    return RandomStream(seed, microbatch, stage, CPU)


def drawn(draw: Callable[[], Tensor], *key: int) -> Tensor:
    with stream(*key):
        return draw().detach()


def state() -> list[int]:
    return torch.get_rng_state().tolist()


# What is recognised


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_draws_come_from_the_stream_and_leave_torchs_generator_alone(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    before = state()
    first = drawn(draw)
    assert state() == before
    torch.manual_seed(1)
    assert torch.equal(drawn(draw), first)
    assert not torch.equal(drawn(draw, 2), first), "nothing was drawn"


def seeded_operators() -> set[str]:
    """The names of all aten operators that draw, as torch itself tags them."""
    found = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == "aten":
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            if torch.Tag.nondeterministic_seeded in operator.tags:
                found.add(base)
    return found


NOT_RECOGNISED = {
    "miopen_rnn": "called inside lstm and gru on ROCm, below torch functions",
    "normal_functional": "no Python name; made by functionalization",
    "rrelu_with_noise_functional": "no Python name; made by functionalization",
}


def test_every_operator_that_torch_tags_as_drawing_is_recognised() -> None:
    """Names with an underscore in front are internal: kernels of attention, LSTM and dropout under public names."""
    places = (torch, Tensor, F, torch._C._nn, torch._C._VariableFunctions, torch.special)
    public = {name for name in seeded_operators() if not name.startswith("_") and name not in NOT_RECOGNISED}
    assert len(public) > 40
    assert "dropout" in public
    reachable = {name for name in public if any(hasattr(place, name) for place in places)}
    known = random_module._TAKES_GENERATOR | random_module._DRAWS | random_module._DROPOUTS
    known |= random_module._RECURRENT | set(random_module._ATTENTION_DROPOUT)
    assert reachable <= known, f"not recognised: {sorted(reachable - known)}"
    assert {"_sample_dirichlet", "_standard_gamma"} <= known, "called from torch.distributions"


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_takes_the_lock_only_to_drop(monkeypatch: pytest.MonkeyPatch, dropout_p: float) -> None:
    held = CountingLock()
    monkeypatch.setattr(random_module, "_lock", held)
    drawn(lambda: F.scaled_dot_product_attention(SEQUENCE, SEQUENCE, SEQUENCE, dropout_p=dropout_p))
    drawn(lambda: F.scaled_dot_product_attention(SEQUENCE, SEQUENCE, SEQUENCE, None, dropout_p))
    drawn(lambda: torch.relu(SEQUENCE) @ SEQUENCE.transpose(1, 2))
    assert held.count == (2 if dropout_p else 0)


@pytest.mark.parametrize(("layers", "dropout", "count"), [(2, 0.0, 0), (2, 0.5, 1)])
def test_recurrent_layers_take_the_lock_only_to_drop(
    monkeypatch: pytest.MonkeyPatch, layers: int, dropout: float, count: int
) -> None:
    lstm = nn.LSTM(4, 4, layers, dropout=dropout)
    held = CountingLock()
    monkeypatch.setattr(random_module, "_lock", held)
    drawn(lambda: lstm(SEQUENCE)[0])
    assert held.count == count


class CountingLock:
    """Stands in for the lock, and counts how often it is taken."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.count += 1

    def __exit__(self, *error: object) -> None:
        self._lock.release()


# Streams


def test_streams_differ_by_seed_micro_batch_and_stage_and_go_on() -> None:
    keys = list(product((1, 2), range(4), range(4)))
    assert len({tuple(drawn(lambda: torch.rand(3), *key).tolist()) for key in keys}) == len(keys)
    with stream():
        first, second = torch.rand(3), torch.rand(3)
    assert not torch.equal(first, second)


def test_a_step_takes_one_number_from_the_callers_generator() -> None:
    torch.manual_seed(0)
    expected = torch.randint(0, 2**62, ()).item()
    after = state()
    torch.manual_seed(0)
    seed = draw_step_seed()
    drawn(DRAWS["dropout"], seed)
    assert (seed, state()) == (expected, after)


def test_an_error_in_a_draw_gives_the_generator_back() -> None:
    before = state()
    with pytest.raises(RuntimeError), stream():
        torch.multinomial(torch.tensor([-1.0]), 1)
    assert state() == before


def test_the_caller_may_seed_the_step() -> None:
    def step() -> Tensor:
        torch.manual_seed(3)
        return drawn(DRAWS["dropout"], draw_step_seed())

    assert torch.equal(step(), step())


@pytest.mark.parametrize("early", [False, True])
def test_a_recomputation_draws_the_same(early: bool) -> None:
    """Where an output was dropped its gradient is zero, and nowhere else."""

    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        with stream():
            return [F.dropout(tensors[0]) * torch.rand_like(tensors[0]).add(1)]

    x = torch.ones(1000, requires_grad=True)
    (y,), handle = checkpoint(function, [x])
    torch.rand(7)
    if early:
        handle.run()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "y = x * mask * scale at x = 1, so the gradient is y"


# Threads


def rounds(draw: Callable[[], Tensor], key: int, count: int, meet: Callable[[], Any] = lambda: None) -> list[Tensor]:
    results = []
    with stream(key):
        for _ in range(count):
            meet()
            results.append(draw())
    return results


def in_threads(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


BIG = torch.ones(50_000)
CONCURRENT = {"dropout": lambda: F.dropout(BIG), "rand": lambda: torch.rand(50_000)}


@pytest.mark.parametrize("draw", CONCURRENT.values(), ids=CONCURRENT.keys())
def test_tasks_that_draw_at_the_same_time_do_not_disturb_each_other(draw: Callable[[], Tensor]) -> None:
    expected = [rounds(draw, key, 20) for key in (1, 2)]
    found: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(2)
    before = state()
    in_threads(*(lambda key=key: found.update({key: rounds(draw, key, 20, barrier.wait)}) for key in (1, 2)))
    assert state() == before
    for key, results in zip((1, 2), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[key], results, strict=True))


@pytest.mark.parametrize("draw", CONCURRENT.values(), ids=CONCURRENT.keys())
def test_a_thread_that_runs_no_task_may_draw_at_the_same_time(draw: Callable[[], Tensor]) -> None:
    """Like a service that makes the next batch while a step runs. The masks must not change."""
    expected = rounds(draw, 1, 100)
    found: list[Tensor] = []
    begun, done = threading.Event(), threading.Event()

    def task() -> None:
        begun.wait()
        found.extend(rounds(draw, 1, 100))
        done.set()

    def next_batch() -> None:
        while not done.is_set():
            torch.rand(1000)
            begun.set()

    in_threads(task, next_batch)
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not wrong, f"{wrong} of {len(found)} draws were disturbed"


# Other ways to recompute


class CheckpointedByTorch(nn.Module):
    """A stage that recomputes a part of itself with torch's own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(lambda y: F.dropout(y) * 1.0, x * self.scale, use_reentrant=False)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_torchs_own_checkpoint_inside_a_stage_is_right_or_refused(mode: str) -> None:
    """It must raise, since it would silently compute a wrong gradient."""
    stage = CheckpointedByTorch()
    pipe = asyncpipe.Pipeline([stage], ["cpu"], microbatches=1, checkpoint=mode, loss_fn=torch.sum)
    with pipe.sync() as running:
        try:
            output = running.step(torch.ones(1, 1000)).outputs
        except asyncpipe.TaskError:
            return
    assert torch.equal(stage.scale.grad, output[0]), "the gradient of scale is the mask that made the output"


class DropsNothing(nn.Module):
    """The same with a dropout that is switched off, as models for inference and fine-tuning have it."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(lambda y: self.dropout(y) * 2.0, x * self.scale, use_reentrant=False)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.0), nn.Dropout(0.5).eval()], ids=["p=0", "eval"])
def test_torchs_own_checkpoint_without_draws_works(dropout: nn.Module) -> None:
    stage = DropsNothing(dropout)
    pipe = asyncpipe.Pipeline([stage], ["cpu"], microbatches=1, loss_fn=torch.sum)
    with pipe.sync() as running:
        running.step(torch.ones(1, 5))
    assert torch.equal(stage.scale.grad, torch.full((5,), 2.0))
