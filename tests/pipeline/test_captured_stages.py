"""Stages whose kernels are captured, on a CPU: a capture records operators, and a replay runs them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncpipe import Pipeline
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.errors import CompileError
from asyncpipe.ops.model import cuda_graphs
from asyncpipe.ops.model.cuda_graphs import StageCapturer
from asyncpipe.ops.model.stage_compiler import CallKind
from asyncpipe.pipeline import build

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Counts the operators of warm-ups by their shapes; in a capture, keeps them, if they ran three times before."""

    def __init__(self, seen: Counter[Any], kept: list[Any] | None = None) -> None:
        super().__init__()
        self.seen, self.kept = seen, kept

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function), tuple(each.shape for each in tree_leaves(args) if isinstance(each, Tensor))
        made = function(*args, **(kwargs or {}))
        if self.kept is None:
            self.seen[name] += 1
        elif self.seen[name] < 3:
            raise RuntimeError(f"{name} ran {self.seen[name]} times before its capture")
        else:
            self.kept.append((function, args, kwargs or {}, made))
        return made


class RecordedGraph:
    def __init__(self) -> None:
        self.operators: list[Any] = []

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, made in self.operators:
            again = function(*args, **kwargs)
            for one, other in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(one, Tensor) and one.data_ptr() != other.data_ptr():
                    one.copy_(other)


class RecordingDevice:
    """``GraphDevice`` without CUDA. As there, a capture computes nothing that counts, and draws nothing."""

    generator = torch.default_generator
    current: object = "a stream"
    made: ClassVar[list[RecordingDevice]] = []

    def __init__(self, device: torch.device) -> None:
        self.seen: Counter[Any] = Counter()
        self.captures = self.warmed_up = 0
        self.made.append(self)

    def lane(self) -> object:
        return self.current

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.warmed_up += 1
        with Operators(self.seen):
            yield

    @contextmanager
    def capturing(self, other: RecordedGraph | None = None) -> Iterator[RecordedGraph]:
        self.captures += 1
        graph, state = RecordedGraph(), self.generator.get_state()
        with Operators(self.seen, graph.operators):
            yield graph
        self.generator.set_state(state)


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "GraphDevice", RecordingDevice)
    monkeypatch.setattr(build, "check_compiler", lambda *_: None)
    monkeypatch.setattr(RecordingDevice, "made", [])
    monkeypatch.setattr(RecordingDevice, "current", "a stream")


def trained(option: Any, checkpoint: str, schedule: str) -> tuple[list[Tensor], Pipeline]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6)).double()
    loss: Any = nn.functional.mse_loss
    options: Any = {"checkpoint": checkpoint, "schedule": schedule, "loss_fn": loss, "compile": option}
    pipe = Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, balance=[2, 2], **options)
    with pipe.sync() as run:
        losses = [run.step(*torch.randn(2, samples, 6).double()).loss for samples in (8, 8, 10, 8)]
    return [each for each in (*losses, *(p.grad for p in model.parameters())) if each is not None], pipe


@pytest.mark.promise(
    "Bit-identical results", 'With `compile="cudagraphs"`, replayed steps are bit-identical to steps without graphs.'
)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_replays_compute_what_is_computed_without_graphs(checkpoint: str, schedule: str) -> None:
    plain, _ = trained(False, checkpoint, schedule)
    found, pipe = trained("cudagraphs", checkpoint, schedule)
    assert len(plain) == len(found) == 10
    assert all(map(torch.equal, plain, found))
    for stage, device in zip(pipe.stages, RecordingDevice.made, strict=True):
        assert stage.compiler is not None
        made = stage.compiler.compilations
        assert not any(each.again for each in made)
        assert device.captures == sum(each.forward_graphs + each.backward_graphs for each in made)
        # Of each of two sizes, and with checkpoint also without a graph: one warm-up, however many slots there are.
        assert device.warmed_up == (2 if checkpoint == "never" else 4) <= len(made)


class Counted(nn.Module):
    """A stage that counts how often somebody looks at all its parameters."""

    looks = 0

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, received: Any) -> Any:
        return {1: self.layers(received[0])}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.looks += 1
        return super().parameters(recurse)


class Captured:
    """A stage of ``layers``, called by graphs."""

    def __init__(self, *layers: nn.Module) -> None:
        torch.manual_seed(0)
        self.module = Counted(*layers)
        self.capturer = StageCapturer(0, self.module, CPU)
        self.notes: list[Compilation] = []

    def __call__(self, kind: CallKind, x: Tensor) -> Tensor:
        with self.capturer.prepared([x], kind, 0, self.notes) as call:
            found: Tensor = call({0: x})[1]
        return found


def kind(*, may_retain: bool = False, context: object = None) -> CallKind:
    return CallKind(may_retain, context, (), 0)


@pytest.mark.promise(
    "Right results", "Captured stages see parameters, flags, autocast and grad mode that change between steps."
)
@pytest.mark.parametrize(("may_retain", "looks"), [(False, 1), (True, 5)])
def test_a_step_looks_at_the_parameters_once_and_a_call_that_may_be_retained_each_time(
    may_retain: bool, looks: int
) -> None:
    stage, x, of_step = Captured(nn.Linear(3, 3)), torch.ones(2, 3), kind(may_retain=may_retain)
    for _ in range(2):
        stage(of_step, x).sum().backward()
    stage.module.looks = 0
    of_step = kind(may_retain=may_retain)
    for _ in range(5):
        stage(of_step, x).sum().backward()
    assert stage.module.looks == looks
    assert len(stage.notes) == 1


def replace_weight(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data + 1


def freeze(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(False)


@pytest.mark.promise(
    "Right results", "Captured stages see parameters, flags, autocast and grad mode that change between steps."
)
@pytest.mark.parametrize(
    ("change", "captures_more"), [(replace_weight, 1), (freeze, 2), (nn.Linear.eval, 2), (lambda _: None, 0)]
)
def test_what_changes_between_steps_is_seen(change: Callable[[nn.Linear], Any], captures_more: int) -> None:
    linear = nn.Linear(3, 3)
    stage, x = Captured(linear), torch.randn(2, 3)
    for _ in range(3):
        stage(kind(), x).sum().backward()
    change(linear)
    linear.zero_grad()
    before, notes = RecordingDevice.made[0].captures, len(stage.notes)
    for _ in range(2):
        found = stage(kind(), x)
        found.sum().backward()
        torch.testing.assert_close(found, linear(x))
        del found  # It holds a slot.
    assert (linear.weight.grad is None) == (not linear.weight.requires_grad)
    # A kind that is new runs once as it is, and is captured when it comes again.
    assert RecordingDevice.made[0].captures - before == (2 if captures_more else 0)
    assert [bool(each.again) for each in stage.notes[notes:]] == ([captures_more == 1] if captures_more else [])


def test_calls_under_autocast_or_without_a_graph_have_graphs_of_their_own() -> None:
    stage, x = Captured(nn.Linear(3, 3)), torch.randn(2, 3)
    for context in ("float32", "bfloat16"):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=context == "bfloat16"):
                assert stage(kind(context=context), x).dtype is getattr(torch, context)
    with torch.no_grad():
        for _ in range(2):
            assert not stage(kind(), x).requires_grad
    assert [each.kind for each in stage.notes] == ["training", "training", "forward"]


def test_a_parameter_that_autocast_has_cast_before_the_capture_is_cast_in_each_replay() -> None:
    linear = nn.Linear(3, 3)
    stage, x = Captured(linear), torch.ones(1, 3)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            linear(x)
            found = stage(kind(), x)
            torch.testing.assert_close(found, linear(x))
            del found  # It holds a slot.
        with torch.no_grad():
            linear.weight.add_(1)


@pytest.mark.promise(
    "Bit-identical results", 'With `compile="cudagraphs"`, replayed steps are bit-identical to steps without graphs.'
)
def test_warm_ups_and_captures_draw_nothing() -> None:
    stage, x = Captured(nn.Linear(3, 8), nn.Dropout(0.5)), torch.ones(4, 3)
    found, states = [], []
    for _ in range(3):
        torch.manual_seed(7)
        found.append(stage(kind(), x))
        states.append(torch.get_rng_state())
    assert len(stage.notes) == 2  # Their backwards never ran, so no slot was free.
    assert all(torch.equal(found[0], each) for each in found)
    assert all(torch.equal(states[0], each) for each in states)


@pytest.mark.promise("Refused, not wrong", "Captured stages that share one seed on a GPU and both draw are refused.")
@pytest.mark.parametrize(
    ("layer", "streams", "have_seeds", "refused"),
    [
        (nn.Dropout(0.5), ("a", "b"), False, True),
        (nn.Dropout(0.5), ("a", "b"), True, False),
        (nn.Dropout(0.5), ("a", "a"), False, False),
        (nn.Tanh(), ("a", "b"), False, False),
    ],
)
def test_stages_on_two_streams_of_a_gpu_that_share_a_seed_do_not_both_draw(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Module, streams: Sequence[str], have_seeds: bool, refused: bool
) -> None:
    monkeypatch.setattr(cuda_graphs, "CAPTURES_HAVE_SEEDS", have_seeds)
    stages, x = [Captured(nn.Linear(3, 3), layer) for _ in streams], torch.ones(2, 3)

    def run() -> None:
        for stage, stream in zip(stages, streams, strict=True):
            monkeypatch.setattr(RecordingDevice, "current", stream)
            for _ in range(2):
                stage(kind(), x)

    if refused:
        with pytest.raises(CompileError, match=r"it draws random numbers, as stage 0 does on another logical device"):
            run()
    else:
        run()
