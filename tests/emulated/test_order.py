"""Nothing reads what is not there yet: between streams, and on the host. The device raises ``Hazard``, or gives NaN."""

from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from asyncpipe.errors import AsyncpipeError
from tests.emulated import device as emu
from tests.emulated.helpers import TARGET, Call, X, bare, layers, next_step_hangs, piped, squares, take_gradients, worst

ONE, TWO, THREE = ["emu:0"], ["emu:0"] * 2, ["emu:0", "cpu:0", "emu:0"]
MIXED = [["cpu:0", "emu:0"], ["emu:0", "cpu:0"]]


HOW = [
    ("gpipe", "always"),
    ("1f1b", "except_last"),
    ("zb-h1", "never"),
    ("zb-h1", "always"),
    ("backward-first", "never"),
]


@pytest.mark.promise(
    "GPUs", "Gradients are right on accelerators: every kernel is ordered after those whose memory it uses."
)
@pytest.mark.parametrize(
    ("devices", "schedule", "checkpoint"),
    [*((TWO, *how) for how in HOW), *((devices, *how) for devices in (ONE, *MIXED, THREE) for how in HOW[1:4:2])],
)
def test_gradients(devices, schedule, checkpoint):
    model = layers()
    with piped(model, devices, schedule=schedule, checkpoint=checkpoint) as pipe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        for _ in range(2):
            result = pipe.step(X, TARGET)
            # At once, on the caller's stream.
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            squares(pipe(X).cpu(), TARGET).backward()
            assert worst(take_gradients(model)) < 1e-10
        assert worst(gradients) < 1e-10
        assert abs(result.loss.cpu() - bare()[0]) < 1e-10
        assert len(result.wait().report.tasks) == len(result.record.graph.tasks)


def test_a_step_returns_before_its_tasks_are_complete():
    held = ExitStack()

    def hang(x):
        held.enter_context(emu.hold(emu.current_stream()))
        return x * 1

    with piped(layers(hang), ONE, microbatches=1) as pipe:
        result = pipe.step(X, TARGET)
        with pytest.raises(AsyncpipeError, match=r"await result\.completed\(\)"):
            _ = result.report
        held.close()
        assert len(result.wait().report.tasks) == len(result.record.graph.tasks)


@pytest.mark.promise("GPUs", "A CPU stage waits for its input from an accelerator and for nothing queued behind it.")
@pytest.mark.parametrize("devices", [["cpu:0"], *MIXED], ids="-".join)
def test_a_cpu_stage_waits_for_the_callers_tensors(devices):
    """They are on the device; one of them, and the caller's stream, is late."""
    model = layers()
    x, target = X.to("emu:0"), TARGET.to("emu:0")
    with piped(model, devices) as pipe:
        loss = pipe.step(x * 1, target * 1).wait().loss
        assert abs(loss.cpu() - bare()[0]) < 1e-10
        assert worst(take_gradients(model)) < 1e-10
        squares(pipe(x * 1).cpu(), TARGET).backward()
        assert worst(take_gradients(model)) < 1e-10


@pytest.mark.promise("GPUs", "A CPU stage waits for its input from an accelerator and for nothing queued behind it.")
def test_a_cpu_stage_waits_for_its_input_and_for_nothing_behind_it():
    model, x = layers(), X.to("emu:0")
    other = emu.Stream()
    with piped(model, ["cpu:0"]) as pipe, emu.hold(other):
        assert not pipe.step(x * 1, TARGET).wait().loss.isnan()


def count_on_device(target):
    return torch.full((), len(target), device="emu:0")


@pytest.mark.promise("GPUs", "A CPU stage waits for its input from an accelerator and for nothing queued behind it.")
@pytest.mark.parametrize(
    ("devices", "count", "inside"),
    [
        (MIXED[0], count_on_device, False),
        (MIXED[1], count_on_device, True),
        (MIXED[1], len, False),
        (TWO, count_on_device, False),
        (TWO, len, True),
    ],
)
def test_gradients_are_divided_by_the_count_once_that_is_there(devices, count, inside):
    model = layers()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    options = {"optimizer": partial(torch.optim.SGD, lr=1.0, foreach=False)} if inside else {}

    def counted(output, target):
        return squares(output, target), count(target)

    with piped(model, devices, loss_fn=counted, **options) as pipe:
        loss = pipe.step(X, TARGET).wait().loss
    now = [old - new.detach().cpu() for old, new in zip(before, model.parameters(), strict=True)]
    assert worst(now if inside else take_gradients(model)) < 1e-10
    assert abs(loss.cpu() - bare()[0]) < 1e-10


COUNTS = {"none": lambda: None, "int": lambda: 1, "float": lambda: 0.5, "of the host": lambda: torch.tensor(2)}
COUNTS |= {"of the device": lambda: torch.ones((), device="emu:0")}


@pytest.mark.promise("GPUs", "A step makes neither its caller nor a task wait for a device.")
@pytest.mark.parametrize("count", COUNTS)
def test_no_task_and_no_caller_waits_for_the_device(count):
    """Whatever a loss says that it has counted."""
    count = COUNTS[count]()
    with piped(layers(), TWO, loss_fn=lambda y: squares(y) if count is None else (squares(y), count)) as pipe:
        x = X.to("emu:0")
        pipe.step(x).wait()
        emu.synchronized.clear()
        pipe.step(x).wait()
    assert {name for name in emu.synchronized if not name.endswith("completions")} == set()


def test_the_norms_of_all_stages_are_made_without_a_wait():
    model = layers()
    norms = [nn.utils.get_total_norm(bare()[1][k : k + 4]) for k in (0, 4)]
    make = partial(torch.optim.SGD, lr=0.0, foreach=False)
    with piped(model, TWO, optimizer=make, gradient_norms=True) as pipe:
        pipe.step(X, TARGET).wait()
        emu.synchronized.clear()
        found = pipe.step(X, TARGET).gradient_norms
        total = torch.stack(list(found.values())).square().sum().sqrt()
        assert {name for name in emu.synchronized if not name.endswith("completions")} == set()
        assert abs(float(total) - float(nn.utils.get_total_norm(norms))) < 1e-10


def test_ties_skips_and_buffers_of_the_same_device():
    first = nn.Linear(8, 8)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = first.weight

        def forward(self, x):
            return x @ self.weight

    model = nn.Sequential(first, nn.Tanh(), Tied()).double()
    plain = nn.Sequential(first, nn.Tanh(), Tied()).double()
    squares(plain(X)).backward()
    wanted = [gradient.clone() for gradient in take_gradients(plain)]
    with piped(model, TWO, balance=[2, 1]) as pipe:
        pipe.step(X)
        assert worst(take_gradients(model), wanted) < 1e-10


@pytest.mark.promise("GPUs", "Reading the loss of a step does not wait for tasks of the next step.")
def test_a_loss_does_not_wait_for_tasks_of_the_next_step():
    """The next step's kernel hangs on the lane when the first step ends."""
    with next_step_hangs() as (hang, kernel):
        model = nn.Sequential(Call(hang)).double().eval()
        with piped(model, ONE, microbatches=1) as pipe, kernel:
            steps = pipe.steps([(X, TARGET)] * 2)
            assert float(next(steps).loss) == float(squares(X, TARGET))
            kernel.close()
            assert len(list(steps)) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_used_again_behind_all_that_a_recorded_stream_has_waited_for(waits):
    """A tensor of one stream, recorded on a second one, is read on a third: so are inputs that are offloaded."""
    brought, compute, offload = (emu.Stream() for _ in range(3))
    with emu.stream(brought):
        x = torch.ones(8, device="emu:0")
    compute.wait_stream(brought)
    x.record_stream(compute)
    offload.wait_stream(compute)
    with emu.stream(offload):
        x + 1
    if waits:
        compute.wait_stream(offload)
    del x
    with emu.stream(brought), nullcontext() if waits else pytest.raises(emu.Hazard, match="is reused while"):
        torch.ones(8, device="emu:0")
