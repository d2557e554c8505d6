"""``asyncpipe train``: run the training job of a job file, with progress, metrics and a live page."""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command, count
from asyncpipe.cli.metrics import metrics_served
from asyncpipe.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.observe.live import LiveView
    from asyncpipe.train.job_file import Job
    from asyncpipe.train.lasting_run import LastingRun
    from asyncpipe.train.progress import TrainingSummary

__all__ = ["add_parser"]

DESCRIPTION = """\
Train the model of a job file as a pipeline, then evaluate it and generate a sample, if its workload can do that.

SIGINT (Ctrl-C) and SIGTERM end the run after the current step, with a summary, the trace and a last snapshot; a
second signal ends it between two tasks. A trace or a snapshot that cannot be written does not end the run. With
--resume the run continues from its newest intact snapshot, or from scratch if there is none; a supervisor that
restarts it can always give this option.
"""

EXAMPLES = """\
examples:
  asyncpipe train examples/charlm/charlm.toml
  asyncpipe train examples/charlm/charlm.toml --steps 50 --devices cpu:0,cpu:1
  asyncpipe train examples/charlm/charlm.toml --device-type cuda --metrics-port 9400
  asyncpipe train examples/charlm/charlm.toml --plan plan.toml
  asyncpipe train examples/charlm/charlm.toml --workers processes
  asyncpipe train examples/charlm/charlm.toml --workers ray --ray-address 10.0.0.5:6379
  torchrun --nproc-per-node 3 -m asyncpipe.worker train examples/charlm/charlm.toml
  asyncpipe train examples/charlm/charlm.toml --serve 0 --snapshots runs/charlm
  asyncpipe train examples/charlm/charlm.toml --resume runs/charlm
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``train`` to the command line."""
    parser = add_command(subparsers, "train", summary="run a training job", description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("job", metavar="JOB.toml", type=Path, help="the job file")
    parser.add_argument("--plan", type=Path, metavar="FILE.toml", help="the pipeline that 'asyncpipe plan' has printed")
    parser.add_argument("--steps", type=count, metavar="N", help="train for N steps")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--devices", type=_devices, metavar="LIST", help="train on these devices, as cpu:0,cpu:1")
    devices.add_argument(
        "--device-type",
        choices=("cpu", "cuda"),
        help="train on the same number of logical devices of this kind, round robin over those of the machine",
    )
    parser.add_argument(
        "--workers",
        choices=("threads", "processes", "ray", "torchrun"),
        help="where the devices' threads are: in this process, in a worker process for each accelerator and each "
        "CPU device, or in such processes on the machines of a Ray cluster or of torchrun; all but threads need "
        "[training] overlap = true in the job file",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="the cluster that --workers ray uses, as 10.0.0.5:6379; by default one starts on this machine",
    )
    parser.add_argument("--compile", action="store_const", const=True, help="compile each stage with torch.compile")
    _add_watching(parser)
    parser.add_argument("--no-progress", action="store_true", help="print the summary only")
    parser.set_defaults(run=_train)


def _add_watching(parser: argparse.ArgumentParser) -> None:
    """Add the options that override ``[observe]`` and ``[snapshots]``."""
    add = parser.add_argument
    add("--metrics-port", type=_port, metavar="PORT", help="serve metrics on this port; 0 takes any free port")
    add("--metrics-address", metavar="IP", help="serve metrics on this address (default: 127.0.0.1)")
    add(
        "--serve",
        type=_port,
        metavar="PORT",
        help="serve a live page on this port of 127.0.0.1; 0 as above",
    )
    add("--trace", type=Path, metavar="FILE", help="write a trace of the last steps, for Perfetto")
    add("--timeline", type=Path, metavar="FILE.svg", help="draw the last step")
    add(
        "--snapshots",
        type=Path,
        metavar="FOLDER",
        help="save the run to this folder during training and at the end (every 100 steps, with the newest 3 kept, "
        "unless the job file says otherwise); the folder must not hold snapshots of another run",
    )
    add(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="FOLDER",
        help="continue from the newest intact snapshot in FOLDER, which also gets the new ones (default: the folder in "
        "the job file); start from scratch if there is none",
    )
    add("--opentelemetry", action="store_true", default=None, help="report each step as an OpenTelemetry span")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write figures of each step for TensorBoard")
    add("--mlflow", metavar="URI", help="log figures of each step to MLflow: a tracking server or a store")
    add("--nvtx", action="store_true", default=None, help="mark tasks as NVTX ranges, for NVIDIA's profilers")


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a port from 0 (any free one) to 65535, got {text!r}")


def _devices(text: str) -> tuple[str, ...]:
    devices = tuple(device.strip() for device in text.split(","))
    if all(devices):
        return devices
    raise argparse.ArgumentTypeError(f"must be device names with commas between them, as cpu:0,cpu:1, got {text!r}")


def _train(args: argparse.Namespace) -> int:
    # Imported here, and partly after the job file is read: --help and a wrong job file should not wait for torch.
    from asyncpipe.train.job_file import load_job

    job = _with_options(load_job(args.job), args)

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
    if stopped_by is not None:
        print(f"stopped by {stopped_by.name}")
    return 0 if stopped_by is None else 128 + stopped_by


def _with_options(job: Job, args: argparse.Namespace) -> Job:
    """The job with the values of the command line in place of those of the file."""
    from asyncpipe.train.job_file import check_workers, job_file_error, with_plan_file

    if args.plan is not None:
        job = with_plan_file(job, args.plan)
    devices = args.devices
    if args.device_type is not None:
        devices = _logical_devices(len(job.pipeline.devices), args.device_type)
    job = job.override("pipeline", devices=devices, workers=args.workers, compile=args.compile)
    try:
        check_workers(job.pipeline.workers, job.training)
    except ValueError as error:
        raise job_file_error(job.path, str(error)) from None
    job = job.override("ray", address=args.ray_address)
    job = job.override("training", steps=args.steps)
    job = _with_snapshots(job, args.snapshots, args.resume)
    return job.override(
        "observe",
        metrics_port=args.metrics_port,
        metrics_address=args.metrics_address,
        trace=args.trace,
        timeline=args.timeline,
        serve_port=args.serve,
        opentelemetry=args.opentelemetry,
        tensorboard=args.tensorboard,
        mlflow=args.mlflow,
        nvtx=args.nvtx,
    )


def _with_snapshots(job: Job, folder: Path | None, resume: Path | bool | None) -> Job:
    """The job with ``--snapshots`` and ``--resume``; ``resume`` is true if it was given without a folder."""
    if isinstance(resume, Path):
        if folder is not None and folder != resume:
            raise OptionError(f"--resume {resume}: the run's own folder is --snapshots {folder}; give one of them")
        folder = resume
    if resume is not None and folder is None and job.snapshots is None:
        raise OptionError("--resume: the job has no folder for snapshots; give one, as in --resume runs/mine")
    return job.override("snapshots", folder=folder, resume=None if resume is None else True)


def _logical_devices(number: int, kind: str) -> tuple[str, ...]:
    """``number`` logical devices of ``kind``, round robin over those of this machine."""
    if kind == "cpu":
        return tuple(f"cpu:{index}" for index in range(number))
    from torch import cuda

    available = cuda.device_count()
    if not available:
        raise DeviceError("--device-type cuda: this machine has no CUDA device that torch can use; leave it out")
    return tuple(f"cuda:{index % available}" for index in range(number))


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
    print(
        f"{summary.name}: {summary.steps} steps in {summary.seconds:.1f} s, {summary.tokens_per_second:,.0f} tokens/s, "
        f"loss {summary.loss:.3f} and bubble {summary.bubble_ratio:.0%} (mean of the last 20 steps)"
    )
    for stage in summary.compiled:
        print(f"compiled {stage}")
        for reason in (*stage.graph_breaks, *stage.recompilations):
            print(f"  {reason.splitlines()[0]}")
    if summary.skipped:
        print(f"{summary.skipped} updates were skipped: the loss or the gradient norm was not finite")
    if summary.evaluation is not None:
        print(f"held-out loss {summary.evaluation:.3f}")
    if summary.trace is not None:
        print(f"trace: {summary.trace} (open it in https://ui.perfetto.dev)")
    if summary.timeline is not None:
        print(f"timeline: {summary.timeline}")
    if summary.snapshot is not None:
        print(f"snapshot: {summary.snapshot}")
    if summary.finished is not None:
        print(f"model: {summary.finished}")
    if summary.sample is not None:
        print(f"sample:\n{summary.sample}")
