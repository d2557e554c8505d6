"""Own draws: whatever draws on a thread draws from its generators, and torch's own generators stay as they were."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import asyncpipe
from asyncpipe.ops.autograd.own_draws import OwnDraws, replace_torch_random, restore_torch_random
from asyncpipe.ops.torch_internals import DrawsKey

LSTM, ATTENTION = nn.LSTM(4, 4, 2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5)
SEQUENCE = torch.arange(24.0).reshape(3, 2, 4) / 24
ONES = torch.ones(50)


class Generator(OwnDraws):
    """Draws from one generator on the CPU."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(seed)

    def generator(self, device: torch.device) -> torch.Generator | None:
        return self.own if device.type == "cpu" else None


class Passes(TorchDispatchMode):
    """Python code between an operator and those that it calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_mode(draw: Callable[[], Tensor]) -> Tensor:
    with Passes():
        return draw()


def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@pytest.fixture
def _as_in_a_pool() -> Iterator[None]:
    replace_torch_random()
    yield
    restore_torch_random()


def drops(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True)


def draws_in_another_thread(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(torch.rand_like, x))


SCRIPTED, FORKED = scripted(drops), scripted(draws_in_another_thread)


@torch.library.custom_op("asyncpipe_tests::noise", mutates_args=())
def custom_noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand(50)


def drawn_in_backward() -> Tensor:
    x = ONES.clone().requires_grad_()
    return torch.autograd.grad(DrawsInBackward.apply(x).sum(), x)[0]


DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(5),
    "rand, out": lambda: torch.rand(5, out=torch.empty(5)),
    "rand, default generator": lambda: torch.rand(5, generator=torch.default_generator),
    "randperm": lambda: torch.randperm(50),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "method in place": lambda: torch.empty(5).uniform_(),
    "binomial": lambda: torch.binomial(torch.full((50,), 9.0), torch.full((50,), 0.5)),
    "dropout": lambda: F.dropout(ONES),
    "fractional pooling": lambda: nn.FractionalMaxPool2d(2, output_size=8)(torch.arange(1600.0).reshape(1, 4, 20, 20)),
    "lstm": lambda: LSTM(SEQUENCE)[0],
    "attention": lambda: F.scaled_dot_product_attention(SEQUENCE, SEQUENCE, SEQUENCE, dropout_p=0.5),
    "multi-head attention": lambda: ATTENTION(SEQUENCE, SEQUENCE, SEQUENCE)[0],
    "initialisation that torch lets be overridden": lambda: nn.init.kaiming_uniform_(torch.empty(5, 5)),
    "TorchScript": lambda: SCRIPTED(ONES),
    "TorchScript, another thread": lambda: FORKED(ONES),
    "an operator in Python": lambda: custom_noise(ONES),
    "a backward": drawn_in_backward,
    "torch.vmap": lambda: torch.vmap(F.dropout, randomness="different")(torch.ones(5, 10)),
    "torch.cond": lambda: torch.cond(ONES.sum() > 0, F.dropout, torch.sin, (ONES,)),
    "a dispatch mode, rand": lambda: in_mode(lambda: torch.rand(5)),
    "a dispatch mode, native dropout": lambda: in_mode(lambda: torch.native_dropout(ONES, 0.5, True)[0]),
    "torch.random": lambda: torch.get_rng_state()[:32],
}


@pytest.mark.promise(
    "Bit-identical results",
    "A recomputation draws the random numbers of its forward, for every operator of torch that draws.",
)
@pytest.mark.usefixtures("_as_in_a_pool")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_draws_are_those_of_a_default_generator_in_that_state(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with Generator(7):
        first = draw().detach()
    assert torch.equal(torch.get_rng_state(), before)
    with Generator(8):
        assert not torch.equal(draw().detach(), first), "nothing was drawn"
    torch.manual_seed(7)
    assert torch.equal(draw().detach(), first)


def test_a_generator_that_is_given_is_used() -> None:
    mine, wanted = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    with Generator():
        found = torch.rand(5, generator=mine), torch.binomial(ONES * 9, ONES / 2, mine)
    assert torch.equal(found[0], torch.rand(5, generator=wanted))
    assert torch.equal(found[1], torch.binomial(ONES * 9, ONES / 2, wanted))


@pytest.mark.promise(
    "Bit-identical results",
    "A recomputation draws the random numbers of its forward, for every operator of torch that draws.",
)
def test_every_operator_that_torch_tags_as_drawing_has_its_kernel() -> None:
    """Or consists of others that have, or is not for CPUs."""
    with Generator():
        pass
    missing = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten":
            continue
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")

        def has(key: str, full_name: str = full_name) -> bool:
            return torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key)

        if torch.Tag.nondeterministic_seeded in operator.tags and not has("CompositeImplicitAutograd"):
            computes = has("CPU") or has("CompositeExplicitAutograd")
            # Overloads for an out= argument call those without.
            if computes and not has(DrawsKey.NAME) and not overload.endswith("out"):
                missing.append(full_name)
    assert sorted(missing) == [
        "aten::_fused_sdp_choice",  # draws nothing
        "aten::_scaled_dot_product_flash_attention_for_cpu",  # refuses dropout
        "aten::_scaled_dot_product_fused_attention_overrideable",  # for extensions
        "aten::native_dropout",  # calls another one, and Python code that calls it is seen
    ]


@pytest.mark.promise(
    "Your own program",
    "Random numbers inside a `__torch_dispatch__` come from torch, and a recomputation does not replay them.",
)
def test_draws_in_a_dispatch_are_torchs() -> None:
    """A limit: torch switches the thread's keys off while it calls ``__torch_dispatch__``."""

    class Adds(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) + torch.rand(50)

    def draw() -> Tensor:
        with Adds():
            return torch.sin(ONES)

    torch.manual_seed(0)
    wanted = draw()
    torch.manual_seed(0)
    with Generator():
        assert torch.equal(draw(), wanted)


# Scope


@pytest.mark.promise("Your own program", "When all pools are closed, no function or object of torch is replaced.")
def test_nothing_of_torch_stays_replaced() -> None:
    for _ in range(2):
        with asyncpipe.Pipeline([nn.Linear(1, 1)], ["cpu"], microbatches=1, loss_fn=torch.sum).sync(), Generator():
            assert torch.random.__dict__["default_generator"] is not torch.default_generator
        assert torch.random.__dict__["default_generator"] is torch.default_generator
        assert not torch._C._dispatch_tls_is_dispatch_key_included(DrawsKey().key)


def in_threads(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


BIG = torch.ones(50_000)
CONCURRENT = {
    "dropout": lambda: F.dropout(BIG),
    "rand": lambda: torch.rand(50_000),
    "TorchScript": lambda: SCRIPTED(BIG),
}


def rounds(draw: Callable[[], Tensor], seed: int, count: int, meet: Callable[[], Any] = lambda: None) -> list[Tensor]:
    results = []
    with Generator(seed):
        for _ in range(count):
            meet()
            results.append(draw())
    return results


@pytest.mark.promise(
    "Your own program", "A step draws one number from torch's default generator; other threads may draw meanwhile."
)
@pytest.mark.parametrize("draw", CONCURRENT.values(), ids=CONCURRENT.keys())
def test_threads_that_draw_at_the_same_time_do_not_disturb_each_other(draw: Callable[[], Tensor]) -> None:
    expected = [rounds(draw, seed, 20) for seed in (1, 2)]
    found: dict[int, Sequence[Tensor]] = {}
    barrier = threading.Barrier(3)
    torch.manual_seed(0)
    wanted = [draw() for _ in range(20)]
    torch.manual_seed(0)
    outside: list[Tensor] = []
    in_threads(
        *(lambda seed=seed: found.update({seed: rounds(draw, seed, 20, barrier.wait)}) for seed in (1, 2)),
        lambda: outside.extend((barrier.wait(), draw())[1] for _ in range(20)),
    )
    for one, other in zip([*expected, wanted], [found[1], found[2], outside], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("_as_in_a_pool")
def test_torchs_checkpoint_replays_from_the_threads_own_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    x = torch.ones(50, requires_grad=True)
    with Generator():
        y = torch_checkpoint(lambda x: F.dropout(x).mul(1.0), x, use_reentrant=False)
    with Generator(3):
        y.sum().backward()
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(x.grad, y)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot empty a slot")
def test_a_thread_that_drew_leaves_nothing_to_drop_at_its_end() -> None:
    """Python might be at its end by then, too, and the process would abort."""
    left = []

    def draw() -> None:
        with Generator(), Generator():
            torch.rand(1)
        left.append(torch._C._is_key_in_tls("asyncpipe: own draws"))

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    assert left == [False]
