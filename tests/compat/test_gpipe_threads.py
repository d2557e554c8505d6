"""The first forward of a ``GPipe``: from several threads at once, in a forked child, and when opening fails."""

from __future__ import annotations

import threading

import pytest
import torch
from forking import in_child
from thread_helpers import run_all
from torch import nn

from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.thread_executor import ThreadExecutor

CALLERS = 8


def gpipe():
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]).double()
    return GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=3)


def batch():
    return torch.arange(6.0, dtype=torch.float64).view(3, 2)


@pytest.mark.promise("Your own program", "The first calls of a `GPipe` may come from several threads at once.")
def test_the_first_call_comes_from_several_threads(new_threads, monkeypatch, no_leaks):
    opened = []
    open_pool = DevicePool.open
    monkeypatch.setattr(DevicePool, "open", lambda pool, **options: opened.append(pool) or open_pool(pool, **options))
    for round_ in range(1, 21):
        model = gpipe()
        wanted = nn.Sequential(*model)(batch())
        for output in run_all(*[lambda model=model: model(batch())] * CALLERS):
            assert torch.equal(output, wanted)
        assert len(opened) == round_
        del model
        opened[-1] = None


@pytest.mark.promise("Your own program", "The first calls of a `GPipe` may come from several threads at once.")
def test_opening_fails_for_one_caller(monkeypatch, no_leaks):
    """Each caller gets the error or an output; whoever comes after the failure opens the pipeline anew."""
    start, failures = ThreadExecutor.start, ["cannot start a thread"]

    def failing(executor, post):
        if executor.device == "cpu#1" and failures:
            raise RuntimeError(failures.pop())
        start(executor, post)

    monkeypatch.setattr(ThreadExecutor, "start", failing)
    model = gpipe()
    wanted = nn.Sequential(*model)(batch())
    results = run_all(*[lambda: model(batch())] * CALLERS)
    failed = [result for result in results if isinstance(result, Exception)]
    assert [str(error) for error in failed] == ["cannot start a thread"]
    assert all(torch.equal(result, wanted) for result in results if result not in failed)
    assert torch.equal(model(batch()), wanted)
    for error in failed:
        error.__traceback__ = None


@pytest.mark.promise("Your own program", "In a forked child, a `GPipe` starts its own threads.")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(no_leaks):
    model = gpipe()
    loss = model(batch()).sum()

    def child():
        torch.set_num_threads(1)  # the OpenMP threads of the parent are not here
        model(batch()).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    gradients = in_child(child)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_while_a_thread_opens_the_pipeline(monkeypatch, no_leaks):
    """The child inherits a lock that no thread of its own will release."""
    opening, forked = threading.Event(), threading.Event()
    open_pool = DevicePool.open

    def hold(pool, **options):
        if threading.current_thread() is thread:
            opening.set()
            assert forked.wait(30)
        open_pool(pool, **options)

    monkeypatch.setattr(DevicePool, "open", hold)
    model = gpipe()
    thread = threading.Thread(target=model, args=(batch(),))
    thread.start()
    assert opening.wait(30)
    try:
        output = in_child(lambda: (torch.set_num_threads(1), model(batch()).detach())[1])
    finally:
        forked.set()
        thread.join()
    assert torch.equal(output, model(batch()))
