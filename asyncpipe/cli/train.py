"""Run a training job.

Train the model of a job file as a pipeline, then evaluate it and generate a sample, if its workload can do that.

Every key of the job file can be given by --set KEY=VALUE, typed and checked as in the file. --steps, --devices,
--replicas, --workers, --serve and --resume are short for such keys.

SIGINT (Ctrl-C) and SIGTERM end the run after the current step, with a summary, the trace and a last snapshot; a
second signal ends it between two tasks. A trace or a snapshot that cannot be written does not end the run. With
--resume the run continues from its newest intact snapshot, or from scratch if there is none; a supervisor that
restarts it can always give this option.

examples:
  asyncpipe train examples/charlm/charlm.toml
  asyncpipe train examples/charlm/charlm.toml --steps 50 --devices cpu:0,cpu:1
  asyncpipe train examples/charlm/charlm.toml --devices cpu:0,cpu:1,cpu:2,cpu:3 --replicas 2
  asyncpipe train examples/charlm/charlm.toml --set pipeline.schedule=zb-h1 --set training.learning_rate=1e-4
  asyncpipe train examples/charlm/charlm.toml --device-type cuda --set observe.metrics_port=9400
  asyncpipe train examples/charlm/charlm.toml --plan plan.toml
  asyncpipe train examples/charlm/charlm.toml --workers processes --set pipeline.compile=true
  asyncpipe train examples/charlm/charlm.toml --workers ray --set ray.address=10.0.0.5:6379
  torchrun --nproc-per-node 3 -m asyncpipe.worker train examples/charlm/charlm.toml
  asyncpipe train examples/charlm/charlm.toml --serve 8080 --set observe.trace=trace.json
  asyncpipe train examples/charlm/charlm.toml --set snapshots.folder=runs/charlm --set snapshots.every=50
  asyncpipe train examples/charlm/charlm.toml --resume runs/charlm
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command, add_set, changes, count, names
from asyncpipe.cli.metrics import metrics_served
from asyncpipe.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.observe.live import LiveView
    from asyncpipe.train.job_file import Job
    from asyncpipe.train.lasting_run import LastingRun
    from asyncpipe.train.progress import TrainingSummary

__all__ = ["add_parser"]

KEYS = {
    "steps": "training.steps",
    "devices": "pipeline.devices",
    "replicas": "pipeline.replicas",
    "workers": "pipeline.workers",
    "serve": "observe.serve_port",
}
"""For which key of the job file an option stands; ``--resume`` stands for two."""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``train`` to the command line."""
    parser = add_command(subparsers, "train", __doc__)
    add = parser.add_argument
    add("job", metavar="JOB.toml", type=Path, help="the job file")
    add("--plan", type=Path, metavar="FILE.toml", help="the pipeline that 'asyncpipe plan' has printed")
    add("--steps", type=count, metavar="N", help="train for N steps")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--devices", type=names, metavar="LIST", help="train on these devices, as cpu:0,cpu:1")
    text = "train on the same number of logical devices of this kind, round robin over those of the machine"
    devices.add_argument("--device-type", choices=("cpu", "cuda"), help=text)
    text = "train N replicas of the pipeline, each on as many of the devices, in their order"
    add("--replicas", type=count, metavar="N", help=text)
    text = "where the devices' threads are: in this process, in a worker process for each accelerator and each CPU "
    text += "device, or in such processes on the machines of a Ray cluster or of torchrun; all but threads need "
    text += "[training] overlap = true in the job file"
    add("--workers", choices=("threads", "processes", "ray", "torchrun"), help=text)
    text = "serve a live page on this port of 127.0.0.1; 0 takes any free port"
    add("--serve", type=_port, metavar="PORT", help=text)
    text = "continue from the newest intact snapshot in FOLDER, which also gets the new ones (default: the folder in "
    text += "the job file); start from scratch if there is none"
    add("--resume", type=Path, nargs="?", const=True, metavar="FOLDER", help=text)
    add_set(parser)
    add("--no-progress", action="store_true", help="print the summary only")
    parser.set_defaults(run=_train)


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a port from 0 (any free one) to 65535, got {text!r}")


def _train(args: argparse.Namespace) -> int:
    job = _job(args)

    # Imported after the job file is read: --help and a wrong job file should not wait for torch.
    from asyncpipe.cli.progress import choose_progress
    from asyncpipe.observe.metrics import PipelineCollector
    from asyncpipe.runtime.portal import new_event_loop
    from asyncpipe.train.entry import find_entry
    from asyncpipe.train.lasting_run import LastingRun

    make_workload = find_entry(job)
    collector = PipelineCollector(job.name)
    view = None
    if job.observe.serve_port is not None:
        from asyncpipe.observe.live import LiveView

        view = LiveView(job.name, steps=job.training.steps)
    with (
        metrics_served(collector, job.observe.metrics_port, job.observe.metrics_address),
        choose_progress(wanted=not args.no_progress) as progress,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        observers = [] if view is None else [view]
        run = LastingRun(job, make_workload, progress=progress, collector=collector, observers=observers)
        summary, stopped_by = runner.run(_run(run, job, view))
    if summary is not None:
        _print_summary(summary)
        _print_next(summary, job, args.job)
    if stopped_by is not None:
        print(f"stopped by {stopped_by.name}")
    return 0 if stopped_by is None else 128 + stopped_by


def _job(args: argparse.Namespace) -> Job:
    """The job of the file, with the values of the command line."""
    from asyncpipe.train.job_file import load_job, load_job_for_service

    if args.device_type is not None:
        own = load_job_for_service(args.job, plan=args.plan)[0].pipeline
        args.devices = _logical_devices(len(own.devices), args.device_type)
        args.replicas = args.replicas or own.replicas
    args.folder = str(args.resume) if isinstance(args.resume, Path) else None
    args.resume = None if args.resume is None else True
    given = changes(args, KEYS | {"folder": "snapshots.folder", "resume": "snapshots.resume"})
    if args.resume and "snapshots.folder" not in given and load_job(args.job).snapshots is None:
        raise OptionError("--resume: the job has no folder for snapshots; give one, as in --resume runs/mine")
    for key in given:
        if key.partition(".")[0] == "service":
            raise OptionError(f"{key}: [service] is read by asyncpipe jobs submit, not by asyncpipe train")
    return load_job(args.job, given, plan=args.plan)


def _logical_devices(number: int, kind: str) -> list[str]:
    """``number`` logical devices of ``kind``, round robin over those of this machine."""
    if kind == "cpu":
        return [f"cpu:{index}" for index in range(number)]
    from torch import cuda

    available = cuda.device_count()
    if not available:
        raise DeviceError("--device-type cuda: this machine has no CUDA device that torch can use; leave it out")
    return [f"cuda:{index % available}" for index in range(number)]


async def _run(
    run: LastingRun, job: Job, view: LiveView | None
) -> tuple[TrainingSummary | None, signal.Signals | None]:
    """The summary, and the signal that ended the run; no summary if a second signal has cut it short."""
    current = asyncio.current_task()
    assert current is not None
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            run.orders.stop()
        else:
            current.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not available on Windows and outside the main thread; Ctrl-C then cancels the run.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, on_signal, number)
    try:
        async with AsyncExitStack() as stack:
            if view is not None and job.observe.serve_port is not None:
                from asyncpipe.observe.live import serve_live

                server = await stack.enter_async_context(serve_live(view, job.observe.serve_port))
                print(f"live view: {server.url}", flush=True)
            return await run.run(), received[0] if received else None
    except asyncio.CancelledError:
        if not received:
            raise
        return None, received[0]
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(number)


def _print_summary(summary: TrainingSummary) -> None:
    speed = f"{summary.tokens_per_second:,.0f} tokens/s, " if summary.tokens_per_second else ""
    print(
        f"{summary.name}: {summary.steps} steps in {summary.seconds:.1f} s, {speed}"
        f"loss {summary.loss:.3f} and bubble {summary.bubble_ratio:.0%} (mean of the last 20 steps)"
    )
    for stage in summary.compiled:
        print(f"compiled {stage}")
        for reason in (*stage.graph_breaks, *stage.recompilations):
            print(f"  {reason.splitlines()[0]}")
    for text, value in (
        ("{} updates were skipped: the loss or the gradient norm was not finite", summary.skipped or None),
        ("held-out loss {:.3f}", summary.evaluation),
        ("trace: {} (open it in https://ui.perfetto.dev)", summary.trace),
        ("timeline: {} (open it in a browser)", summary.timeline),
        ("snapshot: {}", summary.snapshot),
        ("model: {}", summary.finished),
        ("sample:\n{}", summary.sample),
    ):
        if value is not None:
            print(text.format(value))


def _print_next(summary: TrainingSummary, job: Job, job_file: Path) -> None:
    """The commands that go on from here, where a run has left a snapshot to go on from."""
    if summary.snapshot is None:
        return
    program = sys.argv[0] if sys.argv[0].endswith("/asyncpipe") else "asyncpipe"  # It need not be on the path.
    train, folder = f"{program} train {quote(str(job_file))}", summary.snapshot.parent
    print("next:")
    if summary.sample is not None:
        given = " --set 'job.parameters.prompt=\"class \"'" if "prompt" in job.job.parameters else ""
        print(f"  {train} --resume {quote(str(folder))}{given}    # generates from the model")
    print(f"  {train} --resume {quote(str(folder))} --steps {2 * summary.steps}    # trains it longer")
    if job.pipeline.workers == "threads" and job.training.overlap:  # Workers update their stages in the step.
        print(
            f"  {train} --resume {quote(f'{folder}-processes')} --workers processes    # trains one in worker processes"
        )
