"""What stages draw: again in a recomputation, equal in every mode, whatever draws and whoever draws beside."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import asyncpipe
from asyncpipe.ops.autograd.own_draws import own_draws
from asyncpipe.testing import InlineExecutor

MODES = ["never", "except_last", "always"]


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True) + 0.0


def noise(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and people have it.
    scripted_dropout, scripted_noise = torch.jit.script(dropout), torch.jit.script(noise)


class Draw(nn.Module):
    """``draw`` after a scale whose gradient, with ones as input and a sum as loss, is the mask that was drawn."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(50, dtype=torch.float64))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x * self.scale)


class Checkpointed(Draw):
    """The same inside torch's checkpoint."""

    def __init__(self, draw: Callable[[Tensor], Tensor], *, reentrant: bool) -> None:
        super().__init__(draw)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        before = F.dropout(x * self.scale, 0.1)
        out: Any = checkpoint(lambda y: self.draw(y).mul(1.0), before, use_reentrant=self.reentrant)
        return F.dropout(out, 0.1)


def ones(rows: int = 4) -> Tensor:
    return torch.ones(rows, 50, dtype=torch.float64)


def step(stages: list[Any], mode: str, seed: int = 0, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Outputs and gradients of one step of four micro-batches, each stage on a device of its own."""
    devices = [f"cpu:{j}" for j in range(len(stages))]
    modules = [stage if isinstance(stage, nn.Module) else Draw(stage) for stage in stages]
    options = {"microbatches": 4, "loss_reduction": "sum", "loss_fn": torch.sum, **options}
    options["generator"] = torch.Generator().manual_seed(seed)
    with asyncpipe.Pipeline(nn.Sequential(*modules), devices, checkpoint=mode, **options).sync() as pipe:
        outputs = pipe.step(ones()).wait().outputs
        return outputs, [parameter.grad for parameter in pipe.parameters()]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "scripted dropout": scripted_dropout,
    "scripted noise": scripted_noise,
    "rand": lambda x: x * torch.rand(50, dtype=torch.float64),
}


@pytest.mark.promise(
    "Bit-identical results",
    "A recomputation draws the random numbers of its forward, for every operator of torch that draws.",
)
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_what_was_drawn(name: str, mode: str) -> None:
    outputs, (gradient,) = step([DRAWS[name]], mode)
    torch.testing.assert_close(gradient, outputs.sum(0), rtol=0, atol=1e-12)


@pytest.mark.promise(
    "Bit-identical results",
    "A recomputation sees the input, buffers, draws and autocast of its forward: gradients are bit-identical.",
)
@pytest.mark.promise(
    "Bit-identical results", "Random numbers on a CPU are equal in every recomputation mode, schedule and placement."
)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_equal_in_every_mode_schedule_and_placement(name: str) -> None:
    stages = [DRAWS[name]] * 2
    wanted, _ = step(stages, "never")
    for mode, schedule in (("always", "gpipe"), ("except_last", "1f1b"), ("never", "zb-h1"), ("always", "zb-h1")):
        assert torch.equal(step(stages, mode, schedule=schedule)[0], wanted), (mode, schedule)
    assert torch.equal(step(stages, "always", executors=InlineExecutor)[0], wanted)
    assert not torch.equal(step(stages, "never", seed=1)[0], wanted)


# torch's checkpoint inside a stage

# Of a first run, which has no graph. Its gradients come from the second one.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.mark.promise(
    "Bit-identical results",
    "`torch.utils.checkpoint` inside a stage replays its random numbers and disturbs no other stage.",
)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_torchs_checkpoint_inside_a_stage_replays_its_draws(reentrant: bool, schedule: str, mode: str) -> None:
    # The first scale makes the second stage's input require a gradient, without which reentrant checkpoints have none.
    stages = [lambda x: x, Checkpointed(F.dropout, reentrant=reentrant)]
    outputs, gradients = step(stages, mode, schedule=schedule)
    for gradient in gradients:
        torch.testing.assert_close(gradient, outputs.sum(0), rtol=0, atol=1e-12)


@pytest.mark.promise(
    "Bit-identical results",
    "`torch.utils.checkpoint` inside a stage replays its random numbers and disturbs no other stage.",
)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_torchs_checkpoint_recomputes_on_the_tasks_generator(schedule: str) -> None:
    """In B, and in both halves of it. Otherwise it would set the state of torch's default generator meanwhile."""
    own: list[bool] = []

    def draw(x: Tensor) -> Tensor:
        own.append(own_draws() is not None)
        return F.dropout(x * stage.scale)  # A parameter inside: W needs the recomputation as well.

    stage = Checkpointed(draw, reentrant=False)
    step([torch.clone, stage], "never", schedule=schedule)
    assert own == [True] * (8 if schedule == "gpipe" else 12)


@pytest.mark.promise(
    "Bit-identical results",
    "`torch.utils.checkpoint` inside a stage replays its random numbers and disturbs no other stage.",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_in_pipe_x(reentrant: bool) -> None:
    model = nn.Sequential(Draw(lambda x: x), Checkpointed(F.dropout, reentrant=reentrant))
    with asyncpipe.Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, checkpoint="except_last").sync() as pipe:
        outputs = pipe(ones())
        outputs.sum().backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, outputs.detach().sum(0), rtol=0, atol=1e-12)


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[None]:
    """Call ``function`` again and again in another thread; inside, it has been called once."""
    called, done = threading.Event(), threading.Event()

    def run() -> None:
        while not done.is_set():
            function()
            called.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        called.wait()
        yield
    finally:
        done.set()
        thread.join()


def many_checkpoints(x: Tensor) -> Tensor:
    for _ in range(10):
        x = checkpoint(torch.clone, x, use_reentrant=False)
    return x


@pytest.mark.promise(
    "Bit-identical results",
    "`torch.utils.checkpoint` inside a stage replays its random numbers and disturbs no other stage.",
)
@pytest.mark.parametrize("draw", [F.dropout, scripted_dropout], ids=["eager", "scripted"])
def test_torchs_checkpoint_disturbs_nobody(draw: Callable[[Tensor], Tensor]) -> None:
    """Neither the draws of other stages, nor those of the caller's other threads."""
    wanted, _ = step([torch.clone, lambda x: draw(draw(draw(x)))], "always")
    drawn: list[float] = []
    with in_thread(lambda: drawn.append(torch.rand(()).item())):
        for _ in range(5):
            outputs, (_, gradient) = step([many_checkpoints, lambda x: draw(draw(draw(x)))], "always")
            assert torch.equal(outputs, wanted)
            assert torch.equal(gradient, outputs.sum(0))


@pytest.mark.promise(
    "Your own program", "A step draws one number from torch's default generator; other threads may draw meanwhile."
)
def test_a_stage_that_sets_torchs_generator_sets_its_own() -> None:
    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(x)

    before = torch.get_rng_state()
    outputs, _ = step([seeded], "always")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_loss_that_calls_a_pipeline_of_another_pool(mode: str) -> None:
    """Both draw. The inner step's seed is drawn by the outer task, so a recomputation draws it again."""
    teacher = asyncpipe.Pipeline([Draw(scripted_noise)], ["cpu"], microbatches=1).sync()
    with teacher as inner:
        run = lambda: step([scripted_dropout], mode, loss_fn=lambda output: (output * inner(ones(1)).detach()).sum())  # noqa: E731
        (outputs, (gradient,)), (again, (same,)) = run(), run()
    assert torch.equal(outputs, again)
    assert torch.equal(gradient, same)
    assert not torch.equal(gradient, outputs.sum(0))


# Compiled stages


@pytest.mark.promise("Bit-identical results", "A compiled stage replays its random numbers.")
@pytest.mark.parametrize(("backend", "mode"), [("eager", "never"), ("aot_eager", "always")])
def test_a_compiled_stage_replays_its_draws(backend: str, mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    eager, _ = step([lambda x: F.dropout(F.dropout(x) * torch.rand(50, dtype=torch.float64), 0.2)], "never")
    stage = Draw(lambda x: F.dropout(F.dropout(x) * torch.rand(50, dtype=torch.float64), 0.2))
    compiled = torch.compile(stage, backend=backend, fullgraph=True)
    outputs, (gradient,) = step([compiled], mode)
    torch.testing.assert_close(gradient, outputs.sum(0), rtol=0, atol=1e-12)
    assert torch.equal(outputs, eager)
    assert counters["stats"]["unique_graphs"] == {"never": 1, "always": 2}[mode], "with a graph, and without"


# Refused


@pytest.mark.promise(
    "Refused, not wrong", "A recomputation that draws more or fewer numbers than its forward is refused."
)
def test_a_recomputation_that_draws_something_else_is_refused() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50, dtype=torch.float64))
            self.noise: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.noise is None:
                self.noise = torch.rand(50)
            return F.dropout(x * self.weight)

    with pytest.raises(asyncpipe.TaskError, match="drew other random numbers") as caught:
        step([Once()], "always", microbatches=1)
    assert isinstance(caught.value.__cause__, asyncpipe.errors.RecomputeError)


# The seed of a step


@pytest.mark.promise(
    "Bit-identical results", "Random numbers on a CPU are equal in every recomputation mode, schedule and placement."
)
def test_the_seed_of_a_step_is_drawn_on_the_cpu() -> None:
    """Whatever torch's default device is."""
    wanted, _ = step([F.dropout], "never")
    with torch.device("meta"):
        model, x = Draw(F.dropout).to_empty(device="cpu"), torch.ones(4, 50, dtype=torch.float64, device="cpu")
        nn.init.ones_(model.scale)
        generator = torch.Generator().manual_seed(0)
        pipeline = asyncpipe.Pipeline([model], ["cpu"], microbatches=4, loss_fn=torch.sum, generator=generator)
        with pipeline.sync() as pipe:
            assert torch.equal(pipe.step(x).wait().outputs, wanted)
