"""Whose streams a step waits for, and who waits for it: those of the thread that calls, and no others."""

import threading
from itertools import product

import pytest
import torch
from fault_helpers import OnBackward

from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.ops.device.lent_streams import lent_streams
from tests.emulated import device as emu
from tests.emulated.helpers import X, layers, piped, squares, take_gradients, worst

TWO = ["emu:0"] * 2
STREAMS = ["default", "first", "second"]


@pytest.fixture
def streams():
    return {"default": emu.default_stream(), "first": emu.Stream(), "second": emu.Stream()}


@pytest.fixture
def wanted():
    model, x = layers(), X.clone().requires_grad_()
    squares(model(x)).backward()
    return [x.grad, *take_gradients(model)]


@pytest.mark.promise("GPUs", "After a backward, gradients may be read on the streams of the caller.")
@pytest.mark.parametrize(("forward", "backward"), [*product(STREAMS, repeat=2)])
def test_gradients_may_be_read_where_backward_was_called(streams, wanted, forward, backward):
    ours, theirs = streams[forward], streams[backward]
    with piped(model := layers(), TWO) as pipe:
        for _ in range(2):
            x = X.to("emu:0").requires_grad_()
            emu.synchronize()
            with emu.stream(ours):
                loss = squares(pipe(x))
            theirs.wait_stream(ours)
            with emu.stream(theirs), emu.engine_on(ours):
                start = torch.ones_like(loss)
                ours.wait_stream(theirs)  # As the engine does, with the gradient that a backward starts from.
                loss.backward(start)
                read = [gradient.clone() for gradient in (x.grad, *take_gradients(model))]
            emu.synchronize()
            assert worst(read, wanted) < 1e-10


@pytest.mark.promise("GPUs", "After a backward, gradients may be read on the streams of the caller.")
def test_a_backward_waits_for_no_stream_that_is_current_by_accident(streams, wanted):
    """The engine's thread has the default stream, on which another job's kernel hangs."""
    with piped(model := layers(), TWO) as pipe, emu.hold(streams["default"]):
        with emu.stream(streams["first"]), emu.engine_on(streams["first"]):
            squares(pipe(X.to("emu:0"))).backward()
            read = [gradient.clone() for gradient in take_gradients(model)]
        done = streams["first"].record_event()
        assert done.query()
    emu.synchronize()
    assert worst(read, wanted[1:]) < 1e-10


@pytest.mark.promise("GPUs", "Parameters' autograd nodes are made on the streams of their devices.")
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_each_parameters_node_is_made_on_the_stream_of_its_lane(streams, checkpoint):
    """There autograd accumulates its gradient. Made elsewhere, autograd warns, and lanes would wait for that stream."""
    with piped(model := layers(), TWO, checkpoint=checkpoint) as pipe:
        lanes = [stream.stream for lane, stream in pipe._parts.resources.streams.items() if lane.queue == "compute"]
        with emu.stream(streams["first"]):
            x = X.to("emu:0").requires_grad_()
            emu.views.clear()
            output = pipe(x)
        made = [stream for thread, stream in emu.views if thread == threading.current_thread().name]
        assert made == [streams["first"], *[lane for lane in lanes for _ in range(4)]]
        assert output.requires_grad
        del output, model


@pytest.mark.promise(
    "Reported, not silent", "More streams than a device has hardware queues are reported once in the log."
)
def test_a_gauge_tells_how_many_streams_are_used():
    """By all objects of the process; a CPU has none."""
    collector = PipelineCollector("a")
    with piped(layers(), [*TWO, "cpu"], balance=[1, 1, 2], observers=[collector]) as pipe:
        pipe.step(X)
        own = {stream.stream for stream in pipe._parts.resources.streams.values() if hasattr(stream, "stream")}
        used = lent_streams(torch.device("emu", 0))
    (gauge,) = [family.samples for family in collector.collect() if family.name == "asyncpipe_streams"]
    assert {sample.labels["device"]: sample.value for sample in gauge} == {"emu:0": used, "cpu": 0}
    assert used >= len(own) >= 2


@pytest.mark.promise("GPUs", "Backwards of stages run on the threads of their devices.")
def test_backwards_of_stages_run_on_the_threads_of_their_devices():
    """Not on the engine's thread of the device, which the caller's backward may hold."""
    threads = set()
    model = layers(lambda x: OnBackward.apply(x, lambda: threads.add(threading.current_thread().name)))
    with piped(model, TWO, balance=[3, 2]) as pipe:
        pipe.step(X)
        squares(pipe(X)).backward()
    assert threads == {"asyncpipe emu:0"}
    assert torch._C._is_multithreading_enabled(), "elsewhere it is as it was"
