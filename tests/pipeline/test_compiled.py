"""Compiled stages compute what stages compute, in one graph a direction, and say what they are."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe import Pipeline, pop, skippable, stash
from asyncpipe.core.records.compilations import CompiledStage
from asyncpipe.ops.autograd import split_backward
from asyncpipe.ops.device.compile_gate import CompileGate
from asyncpipe.ops.model.stage_compiler import StageCompiler
from benchmarks.compiled import CompiledSize, run, show

pytestmark = [
    # Of the compiler itself, which looks at the copies of what a stage may overwrite.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

AOT = {"backend": "aot_eager"}
"""Traces and differentiates as inductor does, and then runs torch's own kernels: bit-equal to what is not compiled."""


@pytest.fixture(autouse=True)
def _nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)  # Not the compiler's traces.
    yield
    torch._dynamo.reset()


@skippable(stash=["kept"])
class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x)
        return x.sin()


@skippable(pop=["kept"])
class Adds(nn.Module):
    def forward(self, x: Tensor) -> Any:
        kept = yield pop("kept")
        return x + kept


class Averages(nn.Module):
    """Scales by a buffer that each forward changes."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x * self.average


class Overwrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


def drawing() -> list[nn.Module]:
    return [Keeps(), nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 6), Adds(), nn.Dropout(0.5)]


def changing() -> list[nn.Module]:
    return [nn.Linear(6, 6), Averages(), Overwrites(), Overwrites(), Averages(), nn.Linear(6, 6)]


def tied() -> list[nn.Module]:
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return [first, nn.Tanh(), nn.GELU(), last]


class Block(nn.Module):
    """A layer with modules inside, of which models have several; ``power`` differs without a parameter's doing so."""

    def __init__(self, power: int = 2, width: int = 6) -> None:
        super().__init__()
        self.widen, self.narrow, self.drop = nn.Linear(6, width), nn.Linear(width, 6), nn.Dropout(0.2)
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(self.narrow(self.widen(x).tanh() ** self.power))
        return found


def blocks() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Dropout(0.1), Block(), Block(), Block(), Block(), nn.Tanh(), nn.Linear(6, 6)]


def different_blocks() -> list[nn.Module]:
    return [Block(power) for power in range(1, 21)]


def lone_blocks() -> list[nn.Module]:
    return [Block(width=3), Block(width=4), Block(width=5), nn.Linear(6, 6)]


def trained(
    layers: Callable[[], list[nn.Module]],
    option: Any,
    *,
    samples: int = 6,
    call: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
    **options: Any,
) -> tuple[list[Tensor], tuple[CompiledStage, ...]]:
    """Losses, gradients and buffers of two steps, and what was compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).double()
    half = len(model) // 2
    options = {"balance": [half, len(model) - half], "checkpoint": "always", **options}
    options |= {"loss_fn": nn.functional.mse_loss, "compile": option}
    pipe = Pipeline(model, ["cpu:0", "cpu:1"], microbatches=3, **options)
    losses = []
    with pipe.sync() as run:
        for _ in range(2):
            x, target = torch.randn(2, samples, 6).double()
            loss = run.step(x, target).loss if call is None else call(run, x, target)
            assert loss is not None
            losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *model.buffers()], pipe.compiled


def check_same(layers: Callable[[], list[nn.Module]], **options: Any) -> tuple[CompiledStage, ...]:
    """Train with and without the compiler; the results are the same to the last bit. What was compiled."""
    plain, none = trained(layers, False, **options)
    found, compiled = trained(layers, AOT, **options)
    assert none == ()
    assert len(plain) == len(found)
    assert all(map(torch.equal, plain, found))
    assert [stage.stage for stage in compiled] == [0, 1]
    for stage in compiled:
        assert (stage.forward_graphs, stage.backward_graphs) == (1, 1)
        assert stage.graph_breaks == stage.recompilations == ()
    return compiled


@pytest.mark.promise(
    "Right results", "A compiled stage is one graph in each direction and computes what it computes without `compile`."
)
def test_a_stage_with_draws_skips_and_recomputation_is_one_graph_a_direction() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    check_same(drawing)
    assert not counters["graph_break"]
    # Each stage once without a graph, for the first run, and once with one.
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.promise(
    "Right results", "Compiled stages may change buffers, overwrite inputs, retain graphs and run under autocast."
)
@pytest.mark.promise("Right results", "Micro-batches of different sizes are compiled once.")
def test_stages_that_change_buffers_and_overwrite_inputs_of_different_sizes_are_compiled_once() -> None:
    compiled = check_same(changing, samples=7, checkpoint="except_last")
    assert all(stage.seconds > 0 for stage in compiled)


@pytest.mark.promise("Right results", "Equal blocks of a compiled stage are compiled once.")
@pytest.mark.parametrize(
    ("layers", "regional", "graphs"),
    [
        (blocks, True, [1, 1]),
        (blocks, False, [1, 1]),
        # The compiler takes the power for fixed, and gives up code that it has compiled 8 times.
        pytest.param(different_blocks, True, [10, 10], marks=pytest.mark.long),
        (lone_blocks, True, [1, 1]),
    ],
)
def test_blocks_that_a_stage_has_several_of_are_compiled_once(
    layers: Callable[[], list[nn.Module]], regional: bool, graphs: list[int]
) -> None:
    plain, _ = trained(layers, False, samples=7, checkpoint="except_last")
    found, compiled = trained(layers, {**AOT, "regional": regional}, samples=7, checkpoint="except_last")
    assert all(map(torch.equal, plain, found))
    assert [(stage.forward_graphs, stage.backward_graphs) for stage in compiled] == [(each, each) for each in graphs]
    # Micro-batches have two sizes, for which nothing is compiled once more.
    assert not any(stage.recompilations for stage in compiled)


@pytest.mark.promise(
    "Reported, not silent", "A recompilation for other sizes is shown in the log, the report of the step and a metric."
)
def test_sizes_that_change_between_steps_are_a_recompilation_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes = iter((6, 9))

    def step(run: Any, x: Tensor, target: Tensor) -> Tensor:
        samples = next(sizes)
        result = run.step(x[:samples], target[:samples])
        told.append([(each.stage, bool(each.again)) for each in result.report.compilations])
        loss: Tensor = result.loss
        return loss

    told: list[list[tuple[int, bool]]] = []
    _, compiled = trained(tied, AOT, samples=9, call=step, checkpoint="never")
    assert [sorted(each) for each in told] == [[(0, False), (1, False)], [(0, True), (1, True)]]
    assert all("size mismatch at index 0" in reason for stage in compiled for reason in stage.recompilations)
    assert "stage 1 was compiled once more" in caplog.text


@pytest.mark.promise(
    "Right results", "Compiled stages may change buffers, overwrite inputs, retain graphs and run under autocast."
)
@pytest.mark.promise("Reported, not silent", "A backward that a compiled stage cannot split is announced in the log.")
def test_a_schedule_with_split_backwards_says_that_they_are_whole(caplog: pytest.LogCaptureFixture) -> None:
    split_backward._tell_once.cache_clear()
    check_same(tied, schedule="zb-h1")
    assert "CompiledFunctionBackward cannot compute a part of its gradients" in caplog.text


@pytest.mark.promise(
    "Right results", "Compiled stages may change buffers, overwrite inputs, retain graphs and run under autocast."
)
def test_a_graph_may_be_retained_and_forwards_run_alone_under_autocast() -> None:
    def twice(run: Any, x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(run(x), target)
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            return loss.detach() + run(x).sum()

    check_same(tied, call=twice, checkpoint="never")


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.cos()


@pytest.mark.promise(
    "Reported, not silent",
    "No stage silently runs without the compiler: a graph break is an error or a warning that names the stage.",
)
def test_a_graph_break_is_an_error_that_names_the_stage_or_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), nn.Tanh(), Breaks(), nn.Linear(6, 6)]

    with pytest.raises(asyncpipe.TaskError) as caught:
        trained(layers, AOT)
    assert isinstance(caught.value.__cause__, asyncpipe.errors.CompileError)
    assert caught.value.__cause__.stage == 1
    plain, _ = trained(layers, False)
    found, compiled = trained(layers, {**AOT, "fullgraph": False})
    assert all(map(torch.equal, plain, found))
    assert [len(stage.graph_breaks) for stage in compiled] == [0, 1]
    assert "stage 1 is not one graph" in caplog.text


class Counts(nn.Module):
    """The compiler takes the number for fixed."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.promise(
    "Reported, not silent",
    "No stage silently runs without the compiler: a graph break is an error or a warning that names the stage.",
)
def test_a_stage_that_reaches_the_limit_of_recompilations_is_told_not_to_be_compiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import config

    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), nn.Tanh(), Counts(), nn.Linear(6, 6)]

    of_kind = StageCompiler._of_kind

    def limiting(self: StageCompiler, *args: Any) -> Any:
        config.recompile_limit = 2  # On the device's thread: the setting is a thread's own.
        return of_kind(self, *args)

    monkeypatch.setattr(StageCompiler, "_of_kind", limiting)
    plain, _ = trained(layers, False, checkpoint="never")
    found, compiled = trained(layers, {**AOT, "fullgraph": False}, checkpoint="never")
    assert all(map(torch.equal, plain, found))
    assert str(compiled[1]) == "stage 1 is not compiled"
    assert "stage 1 runs without the compiler" in caplog.text
    with pytest.raises(asyncpipe.TaskError, match="compiled 2 times already"):
        trained(layers, AOT, checkpoint="never")


@pytest.mark.promise(
    "Right results", "A compiled stage is one graph in each direction and computes what it computes without `compile`."
)
@pytest.mark.promise("Everything ends", "Compilers leave no process behind.")
@pytest.mark.long
def test_inductor_draws_the_same_again_and_leaves_no_process() -> None:
    def losses(checkpoint: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        options: Any = {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "compile": True}
        pipe = Pipeline(model, ["cpu:0"], checkpoint=checkpoint, **options)
        with pipe.sync() as run:
            loss = run.step(*torch.randn(2, 4, 6)).loss
        assert [(stage.forward_graphs, stage.backward_graphs) for stage in pipe.compiled] == [(1, 1)]
        assert loss is not None
        return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    # The forward that is recomputed was compiled without a graph, and refused if it drew other numbers.
    for one, other in zip(losses("never"), losses("always"), strict=True):
        torch.testing.assert_close(one, other)
    assert not multiprocessing.active_children()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


@pytest.mark.promise(
    "Everything ends", "While a stage is compiled no other task runs, and that time is not counted as time of tasks."
)
def test_while_one_thread_compiles_no_other_runs_a_task_and_two_that_compile_take_turns() -> None:
    gate, log = CompileGate(), []
    inside, compiling, first = threading.Event(), threading.Event(), threading.Barrier(2)

    def runs() -> None:
        with gate.task():
            inside.set()
            with gate.task():
                log.append("task")

    def compiles(name: str) -> None:
        first.wait()
        with gate.task(), gate.compiling():
            log.append(f"{name} begins")
            compiling.set()
            log.append(f"{name} ends")

    with gate.task():
        threads = [threading.Thread(target=compiles, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        assert not compiling.wait(0.05)
    for thread in threads:
        thread.join()
    other = threading.Thread(target=runs)
    with gate.compiling():
        other.start()
        assert not inside.wait(0.05)
        log.append("compiled")
    other.join()
    assert [line.split()[-1] for line in log] == ["begins", "ends", "begins", "ends", "compiled", "task"]


@pytest.mark.promise(
    "Refused, not wrong",
    "Options of `torch.compile` that do not work for stages, and a missing compiler, are refused before anything runs.",
)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("yes", "compile must be True, False, 'cudagraphs', or a dict"),
        ({"fullgraph": 1}, "fullgraph must be True or False"),
        ({"regional": "no"}, "regional must be True or False"),
        ({"disable": True}, "'disable' cannot be given for stages.*compile=False"),
        ({"mode": "reduce-overhead"}, "the next micro-batch would overwrite"),
        ({"mode": "fast"}, "mode must be 'default'"),
        ({"mode": "default", "options": {}}, "mode or options, not both"),
        ({"backend": "nothing"}, "Invalid backend: 'nothing'"),
        ({"options": {"nothing": 1}}, "Unexpected optimization option nothing"),
        ("cudagraphs", "needs CUDA devices, and 'cpu:0' is none"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_runs(value: Any, says: str) -> None:
    with pytest.raises(asyncpipe.errors.OptionError, match=says):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), ["cpu:0"], microbatches=1, compile=value)


@pytest.mark.promise(
    "Refused, not wrong",
    "Options of `torch.compile` that do not work for stages, and a missing compiler, are refused before anything runs.",
)
def test_a_missing_compiler_and_deferred_batch_norms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    model = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(asyncpipe.errors.OptionError, match="deferred batch norms count in Python"):
        Pipeline(model, ["cpu:0"], microbatches=1, compile=AOT, deferred_batch_norm=True)

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(asyncpipe.errors.OptionError, match="install g\\+\\+"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), ["cpu:0"], microbatches=1, compile=True)


@pytest.mark.long
def test_the_benchmark_compares_compiled_stages_with_those_that_are_not() -> None:
    model = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 16, "checked_layers": 1}
    size = CompiledSize(**model, samples=2, tokens=4, shorter_tokens=3, microbatches=2, rounds=1)
    lines: list[str] = []
    figures = run(lines.append, size, backend="aot_eager")
    assert figures["graphs"] == [(1, 1), (1, 1)]
    assert (figures["gradients_off"], figures["graph_breaks"], figures["recompilations"]) == (0.0, 0, 0)
    assert "0 graph breaks, 0 recompilations" in show(figures)
    assert "comparing gradients" in lines
