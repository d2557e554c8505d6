"""A compute-bound model as a pipeline on 2 CPU devices, against its bound and against one device.

Both arms run the same micro-batches of the same model: the pipeline on two devices with one intra-op thread each, and a
plain loop without any library on one thread.
"""

from __future__ import annotations

from functools import partial

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import Case, mlp
from asyncpipe.bench.contestants import pipelined, plain_loop
from asyncpipe.bench.harness import markdown, medians, one_intra_op_thread, rounds

__all__ = ["run", "show"]

WARM_UP, ROUNDS = 2, 9
CASE = Case("2 stages of 4 × Linear(1024)+ReLU, m=16, 128 rows each", 2, 16, (128, 1024), partial(mlp, 1024, 4))


def run(progress: Progress, *, case: Case = CASE) -> Figures:
    """Medians over rounds: step over bound, and one device over two."""
    rows = []
    with one_intra_op_thread(), plain_loop(case) as plain, pipelined(case) as pipe:
        for _ in rounds(WARM_UP + ROUNDS, progress):
            step, one_device = pipe.seconds(), plain.seconds()
            report = pipe.results[-1].report
            over = {"over_bound": step / report.bound, "over_busiest_device": step / max(report.device_busy.values())}
            rows.append({"step_seconds": step, "one_device_seconds": one_device, **over, "speed_up": one_device / step})
            plain.clear()
            pipe.clear()
    return {"about": case.about, "bubble": 1 + 1 / case.microbatches, "medians": medians(rows[WARM_UP:])}


show = markdown(
    medians="{about}, 1f1b on 2 CPU devices. The bound is the busiest device or the critical path; the bubble alone "
    "makes a step {bubble:.3f} times the busiest device's time:"
)
