"""The example trains to the same bits wherever its workers are, and whoever has started them.

::

    python -m tests.campaigns.launchers threads --steps 20
    python -m tests.campaigns.launchers processes --steps 20
    python -m tests.campaigns.launchers ray --steps 20          # on two Ray nodes of this machine, which it starts
    torchrun --nproc-per-node 3 -m asyncpipe.worker -m tests.campaigns.launchers torchrun --steps 20

Each prints the SHA-256 of all losses, gradient norms and the held-out loss, to the last bit: they must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from asyncpipe.train.entry import find_entry
from asyncpipe.train.job_file import load_job
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress
from asyncpipe.train.training_run import TrainingRun

JOB = Path(__file__).parents[2] / "examples" / "charlm" / "charlm.toml"
TWO_NODES = """
import sys
from ray.cluster_utils import Cluster

store = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
cluster.add_node(num_cpus=2, **store)
print(cluster.address, file=sys.stderr)
sys.stdin.read()
cluster.shutdown()
"""


class Figures(ProgressSink):
    def __init__(self) -> None:
        self.figures: list[tuple[float, float]] = []
        self.started_at = 0.0
        self.workers: tuple[str, ...] = ()

    def started(self, run: RunStarted) -> None:
        self.started_at = time.perf_counter()
        self.workers = run.workers

    def stepped(self, progress: StepProgress) -> None:
        self.figures.append((progress.loss, progress.gradient_norm))


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", TWO_NODES], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            address = line.strip()
            if address.rpartition(":")[2].isdecimal() and " " not in address:
                break
        yield address
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", choices=("threads", "processes", "ray", "torchrun"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", default="", help="as host-a/cpu:0,host-a/cpu:1,host-b/cpu:0,host-b/cpu:1")
    args = parser.parse_args()
    job = load_job(JOB).override("training", steps=args.steps).override("pipeline", workers=args.workers)
    job = job.model_copy(update={"observe": type(job.observe)()})
    if args.devices:
        job = job.override("pipeline", devices=tuple(args.devices.split(",")))
    figures = Figures()
    with two_nodes() if args.workers == "ray" else nullcontext("") as address:
        if address:
            job = job.override("ray", address=address)
        begin = time.perf_counter()
        summary = asyncio.run(TrainingRun(job, find_entry(job), progress=figures).run())
        end = time.perf_counter()
    digest = hashlib.sha256()
    for figure in (*figures.figures, (summary.loss, summary.evaluation or 0.0)):
        digest.update(" ".join(value.hex() for value in figure).encode())
    print(
        f"{args.workers}: {len(figures.figures)} steps on {', '.join(figures.workers) or 'threads'}; last loss "
        f"{figures.figures[-1][0]!r}; {digest.hexdigest()[:16]}; up after {figures.started_at - begin:.1f} s, "
        f"{summary.seconds:.1f} s of steps, {end - begin:.1f} s in all"
    )


if __name__ == "__main__":
    main()
