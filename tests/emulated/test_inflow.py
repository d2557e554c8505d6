"""What the caller gives to an accelerator: when and by whom it is read, and when it may be overwritten."""

import threading
from collections import Counter

import pytest
import torch

from asyncpipe.errors import TaskError
from asyncpipe.ops.device import inflow
from asyncpipe.ops.device.copies import Copier, queue_host_copy
from asyncpipe.ops.device.inflow import Inflow
from asyncpipe.ops.device.streams import AcceleratorStream
from tests.emulated import device as emu
from tests.emulated.helpers import TARGET, X, bare, layers, piped, squares, take_gradients, worst

TWO, MIXED = ["emu:0"] * 2, ["emu:0", "cpu:0"]


@pytest.fixture(params=[1 << 18, 1], ids=["small", "large"])
def large(request, monkeypatch):
    monkeypatch.setattr(inflow, "LARGE", request.param)
    return request.param == 1


@pytest.fixture
def pinning(monkeypatch):
    """The names of the threads that pin."""
    names, real = Counter(), torch.Tensor.pin_memory

    def pin(tensor, *_):
        names[threading.current_thread().name] += 1
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return names


def no_thread_pins():
    """Soon."""
    for thread in threading.enumerate():
        if thread.name.startswith("asyncpipe inputs"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.promise(
    "GPUs", "Mini-batches reach accelerators on streams of their own; large ones are pinned by a thread of their own."
)
@pytest.mark.parametrize(
    ("devices", "schedule"), [(TWO, "gpipe"), (MIXED, "1f1b"), (TWO, "backward-first")], ids=["gpipe", "mixed", "free"]
)
def test_large_tensors_are_pinned_by_a_thread_and_come_by_streams_of_their_own(pinning, large, devices, schedule):
    model = layers()
    with piped(model, devices, schedule=schedule) as pipe:
        computing = [s for lane, s in pipe._parts.resources.streams.items() if lane.queue == "compute"]
        for _ in range(2):
            emu.copied_by.clear()
            pipe.step(X, TARGET).wait()
            assert worst(take_gradients(model)) < 1e-10
            squares(pipe(X).cpu(), TARGET).backward()
            assert worst(take_gradients(model)) < 1e-10
        assert len(emu.copied_by) >= 2, "one of the caller's, for the loss"
        assert not emu.copied_by & {getattr(stream, "stream", None) for stream in computing}
    no_thread_pins()
    if devices is TWO:  # What a stage on the CPU sends is pinned by the receiver's thread.
        assert {name.startswith("asyncpipe inputs") for name in pinning} == {large}


@pytest.mark.promise("GPUs", "When a step or call returns, the mini-batch has been read, and you may overwrite it.")
@pytest.mark.parametrize("call", ["step", "call"])
def test_a_pinned_batch_may_be_overwritten_when_the_call_returns(monkeypatch, large, call):
    """The caller's stream, behind which copies read the batch, is late: the call waits, on no device's thread."""
    x, target = X.clone().pin_memory(), TARGET.clone().pin_memory()
    waited, real = [], emu.Event.synchronize
    with piped(layers(), TWO) as pipe:
        pipe.step(X, TARGET).wait()
        with emu.hold(emu.current_stream()) as gate:

            def synchronize(event):
                if not (name := threading.current_thread().name).endswith("completions"):
                    waited.append(name)
                    gate.set()
                real(event)

            monkeypatch.setattr(emu.Event, "synchronize", synchronize)
            result = pipe.step(x, target) if call == "step" else pipe(x)
            x.fill_(torch.nan)
            target.fill_(torch.nan)
        monkeypatch.undo()
        if call == "step":
            result.wait()
            assert abs(result.loss.cpu() - bare()[0]) < 1e-10
        else:
            assert not result.cpu().isnan().any()
        pipe.step(X, TARGET).wait()
    assert not {name for name in waited if name.startswith("asyncpipe emu")}


@pytest.mark.promise("GPUs", "When a step or call returns, the mini-batch has been read, and you may overwrite it.")
def test_any_other_batch_may_be_overwritten_when_the_step_returns(large):
    """However late the device is."""
    x, target = X.clone(), TARGET.clone()
    with piped(layers(), TWO) as pipe:
        pipe.step(X, TARGET).wait()
        with emu.hold(emu.current_stream()):
            result = pipe.step(x, target)
            x.fill_(torch.nan)
            target.fill_(torch.nan)
        assert abs(result.wait().loss.cpu() - bare()[0]) < 1e-10


@pytest.mark.promise("GPUs", "When a step or call returns, the mini-batch has been read, and you may overwrite it.")
@pytest.mark.parametrize("devices", [TWO, MIXED], ids="-".join)
def test_what_the_caller_still_copies_to_pinned_memory_is_waited_for(devices):
    with piped(layers(), devices) as pipe:
        x, target = X.to("emu:0"), TARGET.to("emu:0")
        late = queue_host_copy(x * 1)
        assert late.isnan().all()
        assert abs(pipe.step(late, target).wait().loss.cpu() - bare()[0]) < 1e-10


def test_micro_batches_may_be_taken_in_any_order(large):
    compute = AcceleratorStream(torch.device("emu:0"))
    copier, given = Copier(compute, compute), {i: [torch.full((3,), float(i))] for i in range(6)}
    coming = Inflow({copier: dict(given)}, {})
    for i in (3, 0, 5, 1, 4, 2):
        (moved,) = coming.take(copier, i, given[i])
        with compute.use():
            assert (moved * 1).cpu().tolist() == [float(i)] * 3


def test_an_error_of_the_thread_is_that_of_the_forward_and_leaves_no_thread(monkeypatch):
    monkeypatch.setattr(inflow, "LARGE", 1)

    def refuse(tensor, *_):
        raise RuntimeError("no memory to pin")

    with piped(layers(), TWO) as pipe:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "pin_memory", refuse)
            with pytest.raises(TaskError, match=r"F\(0,0\).*no memory to pin"):
                pipe.step(X, TARGET)
        pipe.step(X, TARGET).wait()
    no_thread_pins()


@pytest.mark.promise("GPUs", "No thread that waits for an accelerator makes a context on another one.")
@pytest.mark.parametrize("devices", [TWO, MIXED], ids="-".join)
def test_every_thread_that_waits_for_the_device_has_set_it(large, devices):
    """Else CUDA makes a context on GPU 0 for it. Threads of the caller look after themselves."""
    with piped(layers(), devices) as pipe:
        pipe.step(X.clone().pin_memory(), TARGET).wait()
        squares(pipe(X).cpu(), TARGET).backward()
    assert emu.strays <= {threading.current_thread().name}
