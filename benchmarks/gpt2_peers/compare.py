"""Runs GPT-2 with asyncpipe, torch.distributed.pipelining and accelerate, and says who is right, and who is how fast.

::

    python -m benchmarks.gpt2_peers.compare                # what each makes of each case, and lines of code
    python -m benchmarks.gpt2_peers.compare --times 11     # steps that take turns: medians and quartiles

torch and accelerate run in two processes over gloo, which this one starts; asyncpipe on two threads, and for the times
also in two worker processes. Everyone computes with one thread for each device.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

from benchmarks.gpt2_peers.gpt2 import CASES, MICROBATCHES, TIMED, Case, Found, verdict, wanted

HERE = Path(__file__).parent
TOKENS, SAMPLES = 64, 16
PATIENCE = 60.0
"""Seconds in which both ranks must have answered."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--times", type=int, default=0, metavar="N", help="measure N turns in place of comparing")
    parser.add_argument("--case", default="", help="only the cases whose name this expression finds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in timed(given.times) if given.times else compared(given.case):
        print(line, flush=True)


# Who is right


def compared(chosen: str = "") -> Iterator[str]:
    """A table of what each makes of each case, whose name the expression ``chosen`` finds."""
    contestants = {"asyncpipe": _by_asyncpipe, "torch": _by_torch, "accelerate": _by_accelerate}
    lines = [str(_lines(f"with_{name}.py")) for name in contestants]
    yield "| | " + " | ".join(contestants) + " |"
    yield "|---|" + "---|" * len(contestants)
    yield f"| lines of code | {' | '.join(lines)} |"
    for name, case in CASES.items():
        if not re.search(chosen, name):
            continue
        yield f"| {name} | {' | '.join(check(case) for check in contestants.values())} |"
    for _, stack in _RUNNING.values():
        stack.close()


def _lines(program: str) -> int:
    """Lines of code between the marks of a program, without blank ones and docstrings."""
    text = (HERE / program).read_text(encoding="utf-8").split("# begin\n")[1].split("# end\n")[0]
    return sum(
        bool(line.strip()) and not line.strip().startswith(('"""', "from benchmarks")) for line in text.splitlines()
    )


def _outcome(check: Callable[[], Found], case: Case) -> str:
    try:
        return verdict(check(), wanted(case))
    except Exception as error:  # noqa: BLE001 - whatever a contestant raises is what is compared
        kind = "" if isinstance(error, _Refusal) else f"{type(error).__name__}: "
        return f"refused: {kind}{next(iter(str(error).strip().splitlines()), '')[:200]}"


def _by_asyncpipe(case: Case) -> str:
    from benchmarks.gpt2_peers.with_asyncpipe import check

    return _outcome(lambda: check(case), case)


def _by_torch(case: Case) -> str:
    def check() -> Found:
        first, last = _asked("with_torch", case)
        gradients = {**last.gradients, **first.gradients}
        return Found(last.loss, gradients, last.calls)

    return _outcome(check, case)


def _by_accelerate(case: Case) -> str:
    outcome = _outcome(lambda: Found(*_asked("with_accelerate", case)[1]), case)
    return "logits are right; no training" if outcome == "right" else outcome


def _asked(program: str, case: Case) -> list[Any]:
    """What both ranks of a program answer; after an error they are not asked again."""
    ranks, _ = _RUNNING.get(program, (None, None))
    if ranks is None:
        stack = ExitStack()
        ranks = stack.enter_context(_ranks(program))
        _RUNNING[program] = ranks, stack
    try:
        return ranks.ask(("check", case))
    except Exception:
        _RUNNING.pop(program)[1].close()
        raise


_RUNNING: dict[str, tuple[_Ranks, ExitStack]] = {}


# Two processes


class _Refusal(Exception):
    """What a rank has raised, in words."""


class _Ranks:
    def __init__(self, connections: list[Connection[Any, Any]]) -> None:
        self._connections = connections

    def ask(self, question: object) -> list[Any]:
        """Both ranks' answers."""
        for connection in self._connections:
            connection.send(question)
        until = perf_counter() + PATIENCE
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            for rank, connection in enumerate(self._connections):
                if rank not in answers and connection.poll(0.001):
                    answers[rank] = connection.recv()
                    if isinstance(answers[rank], Exception):
                        raise answers[rank]
            if perf_counter() > until:
                raise TimeoutError(f"hangs: rank {' and '.join(map(str, {0, 1} - answers.keys()))} has not answered")
        return [answers[rank] for rank in sorted(answers)]


@contextmanager
def _ranks(program: str) -> Iterator[_Ranks]:
    context = get_context("spawn")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        connections = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(program, folder, rank, theirs), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(ours.close)
            theirs.close()
            connections.append(ours)
        yield _Ranks(connections)


def _serve(program: str, folder: str, rank: int, connection: Connection[Any, Any]) -> None:
    """What a rank does: answer until there are no more questions."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with suppress(EOFError):
        try:
            module = import_module(f"{__package__}.{program}")
            if program == "with_torch":
                module.meet((Path(folder) / "store").as_uri(), rank)
            else:
                # As accelerate's launcher sets them; the processes have met before it looks.
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
                os.environ |= {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
                store = FileStore(str(Path(folder) / "store"), 2)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
            step: Callable[[], Any] | None = None
            while True:
                question, *rest = connection.recv()
                if question == "check":
                    connection.send(module.check(*rest, rank))
                    continue
                if step is None:
                    step = _step_of_torch(module, rank)
                distributed.barrier()
                begun = perf_counter()
                step()
                connection.send((begun, perf_counter()))
        except EOFError:
            raise
        except Exception as error:  # noqa: BLE001 - the other process says it
            cause = error.__cause__ or error
            connection.send(_Refusal(f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}"))


def _step_of_torch(module: Any, rank: int) -> Callable[[], Any]:
    model, batch = _timed_case()
    stage, steps = module.schedule(model, batch, rank)

    def step() -> None:
        stage.submod.zero_grad()
        module.train(steps, batch, rank)

    return step


# Who is how fast


def _timed_case() -> tuple[Any, Any]:
    case = Case(samples=SAMPLES)
    return case.model(TIMED), case.batch(TOKENS, TIMED["vocab_size"])


def timed(turns: int) -> Iterator[str]:
    """Milliseconds of a training step without an optimizer."""
    with ExitStack() as stack:
        steps: dict[str, Callable[[], float]] = {"one thread, no pipeline": _loop()}
        for workers in ("threads", "processes"):
            steps[f"asyncpipe, two {workers}"] = stack.enter_context(_by_pipeline(workers))
        ranks = stack.enter_context(_ranks("with_torch"))

        def by_torch() -> float:
            begun, ended = zip(*ranks.ask(("time",)), strict=True)
            return float(max(ended) - min(begun))

        steps["torch, two processes"] = by_torch
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(turns + 2):
            order = list(steps) if turn % 2 else list(reversed(steps))
            for name in order:
                taken[name].append(steps[name]())
    yield f"{TIMED}, {SAMPLES} samples of {TOKENS} tokens, {MICROBATCHES} micro-batches, 1F1B, nothing recomputed"
    for name, seconds in taken.items():
        low, _, high = quantiles(seconds[2:], n=4, method="inclusive")
        yield f"{name:28} {median(seconds[2:]) * 1e3:8.1f} ms  ({low * 1e3:.1f}-{high * 1e3:.1f})"


def _loop() -> Callable[[], float]:
    """The micro-batches one after the other, by transformers alone."""
    model, batch = _timed_case()

    def step() -> float:
        model.zero_grad()
        begun = perf_counter()
        for part in range(MICROBATCHES):
            size = SAMPLES // MICROBATCHES
            output = model(**{name: value[part * size :][:size] for name, value in batch.items()})
            (output.loss / MICROBATCHES).backward()
        return perf_counter() - begun

    return step


@contextmanager
def _by_pipeline(workers: str) -> Iterator[Callable[[], float]]:
    from benchmarks.gpt2_peers.with_asyncpipe import pipeline

    model, batch = _timed_case()
    # Gradients of workers stay there, with an optimizer that does not update, and add up.
    options = {} if workers == "threads" else {"workers": workers, "optimizer": torch.optim.SGD}
    with pipeline(model, batch, checkpoint="never", **options).sync() as pipe:

        def step() -> float:
            model.zero_grad()
            begun = perf_counter()
            pipe.step(batch, return_outputs=False, update=False)
            return perf_counter() - begun

        yield step


if __name__ == "__main__":
    main()
