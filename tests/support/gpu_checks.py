"""Checks for the tests of ``benchmarks/gpu``: how a process may end. As a program: the command, with these checks."""

from __future__ import annotations

import os
import signal
import sys
import threading

from benchmarks import gpu
from benchmarks.gpu.outcome import Outcome, at_most, check, seen


@check("Is it right?")
def right(machine):
    return Outcome([at_most("wrong", 0, 0, promised=True)], "as it must be")


@check("Is it wrong?")
def wrong(machine):
    print("before the end")
    return Outcome([at_most("wrong", 2, 0, "of 3", promised=True), seen("seen", 1.5, "ms")])


@check("Is it slow?", 2)
def slow(machine):
    return Outcome([at_most("a task", 80, 25, "µs")])


@check("Does it raise?")
def raises(machine):
    print("a line before")
    raise ValueError("no")


@check("Does it die?")
def dies(machine):
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


@check("Does it hang?", limit=1.0)
def hangs(machine):
    print("it hangs", flush=True)
    threading.Event().wait()


@check("Has it a GPU?", needs_gpu="a CPU has none")
def on_gpu(machine):
    raise AssertionError("this runs nowhere")


@check("Has it two GPUs?", gpus=2)
def on_two_gpus(machine):
    raise AssertionError("this runs nowhere")


if __name__ == "__main__":
    gpu.MODULES = "benchmarks.gpu.environment", "gpu_checks"
    gpu.ORDER = ["right", "wrong", "slow", "raises", "dies", "hangs", "on_gpu"]
    sys.exit(gpu.main(sys.argv[1:]))
