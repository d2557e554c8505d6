"""Who hangs: of a step that stands still, the one place where something should happen and does not.

Every device runs its tasks in an order, and is at one of them, its *head*. Who follows what each head waits for comes
to a place that waits for nothing: the root. Everything else waits for it, directly or not::

    cpu:0   B(0,0) ──waits for──▶ B(0,1) on cpu:1 ──message was sent, did not come──▶ the link from b to a
    cpu:2   F(5,2) ──waits for──▶ F(5,1) on cpu:1 ──its message has no credit──▶ cpu:2's F(4,2) ──▶ computes

What is known is what workers say of themselves (``reports.py``), and who of them does not answer. Nothing here
has a clock, or decides what is done about the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from asyncpipe.core.graph.part import BEGINNING, owner_of
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.hangs.reports import PartReport, ReceiverReport, RunningReport, SeenWorker, SenderReport

__all__ = ["HangRoot", "HangState", "HangWait", "cut_off", "hang_roots"]


class HangState(StrEnum):
    """What a task, or the worker at the root, is at."""

    WAITS_FOR_TASK = "waiting for a task"
    """Of another device, which is not done."""
    WAITS_FOR_EDGE = "waiting for an edge"
    """What the task waits for is done elsewhere, and its message has not come. At the root: both ends of the edge
    answer and wait, so what was sent is lost between them."""
    WAITS_FOR_CREDIT = "waiting for a credit"
    """The message has not left: the receiver holds as many as it may. At the root: nobody there needs them any more."""
    COMPUTING = "computing"
    SILENT = "not answering"
    """The process is stopped, or a thread holds the interpreter for ever, or its host cannot be reached."""
    GONE = "gone"
    NOT_TAKING = "not taking messages"
    """What receives for the worker is in something that does not end."""
    NOT_SENDING = "not sending messages"
    NOT_BEGINNING = "not beginning"
    """The worker has all that the task needs, and runs nothing; or it has not begun the step."""


_ROOTS = (
    HangState.GONE,
    HangState.SILENT,
    HangState.COMPUTING,
    HangState.NOT_TAKING,
    HangState.NOT_SENDING,
    HangState.WAITS_FOR_EDGE,
    HangState.WAITS_FOR_CREDIT,
    HangState.NOT_BEGINNING,
)
"""Of several roots, which is named first. Those behind may be what a later look would explain."""


class HangWait(NamedTuple):
    """One wait of the chain that leads to a root."""

    task: str
    device: str
    worker: str
    state: HangState
    awaited: str
    """The task that it waits for."""
    peer: str
    """Whose that is: a worker."""

    def __str__(self) -> str:
        here = f"{self.task} on {self.device} waits for "
        if self.state is HangState.WAITS_FOR_CREDIT:
            return f"{here}{self.awaited}, whose message waits in worker {self.peer!r} for a credit"
        if self.state is HangState.WAITS_FOR_EDGE:
            return f"{here}{self.awaited}, whose message left worker {self.peer!r}"
        return f"{here}{self.awaited}"


@dataclass(frozen=True, slots=True)
class HangRoot:
    """Where a step hangs."""

    state: HangState
    worker: str
    """Who is to do something and does not. Of a link, the receiver. Empty where devices are threads."""
    device: str = ""
    """The device that runs the task, or is to begin it."""
    task: str = ""
    peer: str = ""
    """The worker at the other end, if an edge is at the root."""
    seconds: float = 0.0
    """How long the task has run, or the worker has been silent, if that is known."""
    waits: tuple[HangWait, ...] = ()
    """What leads there, from a task that something of the step waits for."""
    detail: str = ""
    """How a worker is gone."""
    thread: str = ""
    """The name of the thread of the worker that is at fault, if that is known."""

    def __str__(self) -> str:
        """One sentence, without a full stop. Of a task on a thread, ``HungTaskError`` has the text instead."""
        worker = f"worker {self.worker!r}"
        task = f"{self.task} on {self.device}"
        if self.state is HangState.COMPUTING:
            where = f" in {worker}" if self.worker not in ("", self.device) else ""
            return f"{task}{where} has been computing for {self.seconds:.3g} s, and the step waits for it"
        if self.state is HangState.SILENT:
            ran = f" and ran {self.task} on {self.device}" if self.task else ""
            return f"{worker} has not answered for {self.seconds:.3g} s{ran}, and the step waits for it"
        if self.state is HangState.GONE:
            return f"{worker} {self.detail}, and the step waits for it"
        if self.state is HangState.NOT_TAKING:
            return f"{worker} does not take what worker {self.peer!r} sends, for which {task} waits"
        if self.state is HangState.NOT_SENDING:
            return f"{worker} does not send what it has for worker {self.peer!r}, and the step waits for it"
        if self.state is HangState.WAITS_FOR_EDGE:
            return (
                f"nothing gets through from worker {self.peer!r} to {worker}, though both answer, and {task} waits for "
                "what was sent"
            )
        if self.state is HangState.WAITS_FOR_CREDIT:
            return f"{worker} gives no credits back to worker {self.peer!r}, and {task} waits for what that is to send"
        if self.task:
            return f"{worker} has all that {task} needs, and does not begin it"
        return f"{worker} has not begun the step"


class _HangHop(NamedTuple):
    """One hop of a search: a wait and the device that it leads to, or a root."""

    wait: HangWait | None
    device: str
    root: HangRoot | None


def hang_roots(step: int, graph: TaskGraph, workers: Iterable[SeenWorker]) -> list[HangRoot]:
    """The roots of a step that stands still, most telling first, each with a longest chain that was found.

    ``graph`` is that of the whole step. Where nothing hangs, the roots are what the step happens to be at; of a step
    that is at its end there are none.
    """
    search = _RootSearch(step, graph, workers)
    found: dict[tuple[str, ...], HangRoot] = {}
    roots = [root for device in graph.own_devices for root in search.from_device(device)]
    for root in roots or search.circles():
        key = (root.state, root.worker, root.device, root.task, root.peer)
        if key not in found or len(found[key].waits) < len(root.waits):
            found[key] = root
    return sorted(found.values(), key=lambda root: (_ROOTS.index(root.state), -root.seconds))


def cut_off(workers: Iterable[SeenWorker]) -> str | None:
    """The one worker that nothing gets through to or from, though it answers; ``None`` if no worker alone is at fault.

    It is at an end of every pair between which something was lost. If that is true of two, it is the one that has no
    edge to anybody else on which all has come.
    """
    known = {worker.name: worker.report for worker in workers if worker.report is not None}
    lost: list[frozenset[str]] = []
    whole: list[frozenset[str]] = []
    for name, report in known.items():
        for peer, out in report.sends.items():
            if (into := known[peer].receives.get(name) if peer in known else None) is not None:
                pair = frozenset((name, peer))
                if _loses(out, into):
                    lost.append(pair)
                elif out.sent:
                    whole.append(pair)
    suspects = frozenset.intersection(*lost) if lost else frozenset()
    if len(suspects) > 1:
        reached = frozenset().union(*(pair for pair in whole if pair not in lost))
        suspects -= reached
    return next(iter(suspects)) if len(suspects) == 1 else None


def _loses(out: SenderReport, into: ReceiverReport) -> bool:
    """Whether something that was sent has not come, of a step in which nothing happens."""
    return out.is_over or into.is_over or into.came < out.sent or out.is_held_up


class _RootSearch:
    """Follows waits."""

    def __init__(self, step: int, graph: TaskGraph, workers: Iterable[SeenWorker]) -> None:
        self._step = step
        self._graph = graph
        self._workers = {worker.name: worker for worker in workers}
        self._home = {device: worker for worker in self._workers.values() for device in worker.devices}
        self._by_device: dict[str, list[int]] = {}
        for task in graph.tasks:
            self._by_device.setdefault(task.lane.device, []).append(task.number)
        self._next: dict[str, list[_HangHop]] = {}

    def from_device(self, first: str) -> Iterator[HangRoot]:
        """The roots to which the waits of a device lead; a circle leads to none."""
        seen = {first}
        paths: list[tuple[str, tuple[HangWait, ...]]] = [(first, ())]
        for device, waits in paths:  # Grows meanwhile.
            for hop in self._hops(device):
                more = waits if hop.wait is None else (*waits, hop.wait)
                if hop.root is not None:
                    yield replace(hop.root, waits=more)
                elif hop.device not in seen:
                    seen.add(hop.device)
                    paths.append((hop.device, more))

    def circles(self) -> Iterator[HangRoot]:
        """Waits for credits that are part of a circle, where nothing else was found: the window is too small."""
        for device, hops in self._next.items():
            for hop in hops:
                if hop.wait is not None and hop.wait.state is HangState.WAITS_FOR_CREDIT:
                    wait = hop.wait
                    yield HangRoot(wait.state, wait.worker, device, wait.task, wait.peer, waits=(wait,))

    def _hops(self, device: str) -> list[_HangHop]:
        if device not in self._next:
            self._next[device] = list(self._look(device))
        return self._next[device]

    def _look(self, device: str) -> Iterator[_HangHop]:
        """What a device is at."""
        worker = self._home[device]
        if (root := _unreachable(worker, device)) is not None:
            yield _HangHop(None, device, root)
            return
        report = worker.report
        assert report is not None
        part = report.part
        if part is None:
            yield _HangHop(None, device, HangRoot(HangState.NOT_BEGINNING, worker.name, seconds=worker.silent))
            return
        mine = [each for each in report.running if each.device == device and each.step == self._step]
        if mine:
            yield _HangHop(None, device, _computing(worker, mine))
            return
        ready = []
        for head in self._heads(device, part):
            missing = self._missing(head, worker, part)
            if not missing:
                ready.append(head)
            for before, owner in missing:
                yield from self._behind(head, worker, before, owner)
        if ready:
            others = [each for each in report.running if each.device == device]
            task = self._graph.tasks[ready[0]].id
            idle = HangRoot(HangState.NOT_BEGINNING, worker.name, device, task, seconds=worker.silent)
            stuck = next((peer for peer, into in report.receives.items() if into.is_stuck), None)
            if stuck is not None:
                # The device's own thread, which takes messages while it has nothing else to do.
                taker = report.receives[stuck].taker
                idle = replace(idle, state=HangState.NOT_TAKING, peer=stuck, thread=taker)
            yield _HangHop(None, device, _computing(worker, others) if others else idle)

    def _heads(self, device: str, part: PartReport) -> Iterable[int]:
        """The tasks of a device that may be next: one by a program, any whose turn it could be otherwise."""
        if part.heads:
            return [part.heads[device]] if device in part.heads else []
        left = [task for task in self._by_device.get(device, ()) if task not in part.ended]
        waiting = set(left)
        return [task for task in left if waiting.isdisjoint(self._graph.dependencies[task])]

    def _missing(self, task: int, worker: SeenWorker, part: PartReport) -> list[tuple[int, str]]:
        """What ``task`` waits for, and on which device that is; ``BEGINNING`` for the beginning of the step there."""
        graph, missing = self._graph, []
        for before in graph.dependencies[task]:
            device = graph.tasks[before].lane.device
            if before not in part.ended if device in worker.devices else (task, before) not in part.came:
                missing.append((before, device))
        owner = owner_of(graph, graph.tasks[task])
        if owner is not None:
            device = graph.devices[graph.placement[owner]]
            if device not in worker.devices and (task, BEGINNING) not in part.came:
                missing.append((BEGINNING, device))
        return missing

    def _behind(self, task: int, worker: SeenWorker, before: int, device: str) -> Iterator[_HangHop]:
        """Why ``before``, of ``device``, has not reached ``task`` in ``worker``."""
        sender = self._home[device]
        waits = self._wait(task, worker, HangState.WAITS_FOR_TASK, before, sender)
        if sender is worker:
            yield _HangHop(waits, device, None)
        elif (root := _unreachable(sender, device)) is not None:
            yield _HangHop(waits, device, root)
        else:
            assert sender.report is not None
            part = sender.report.part
            if part is None or (before != BEGINNING and before not in part.ended):
                yield _HangHop(waits, device, None)
            else:
                yield from self._on_edge(task, worker, before, sender)

    def _on_edge(self, task: int, worker: SeenWorker, before: int, sender: SeenWorker) -> Iterator[_HangHop]:
        """Why the message that ``before`` has sent to ``task`` is not there. Both workers answer."""
        named = self._graph.tasks[task]
        device = named.lane.device
        on_edge = self._wait(task, worker, HangState.WAITS_FOR_EDGE, before, sender)
        assert sender.report is not None
        assert worker.report is not None
        out, into = sender.report.sends.get(worker.name), worker.report.receives.get(sender.name)

        def root(state: HangState, at: SeenWorker = worker) -> HangRoot:
            peer = sender if at is worker else worker
            return HangRoot(state, at.name, device if at is worker else "", named.id if at is worker else "", peer.name)

        if into is None or out is None:
            yield _HangHop(on_edge, device, root(HangState.WAITS_FOR_EDGE))
        elif into.is_stuck:
            yield _HangHop(on_edge, device, replace(root(HangState.NOT_TAKING), thread=into.taker))
        elif _loses(out, into):
            yield _HangHop(on_edge, device, root(HangState.WAITS_FOR_EDGE))
        elif (task, before) not in out.queued:
            # It has come, and nobody has it.
            yield _HangHop(on_edge, device, root(HangState.NOT_TAKING))
        elif out.sent < out.limit:
            yield from self._unsent(root(HangState.NOT_SENDING, sender), on_edge, before, sender)
        elif into.limit > out.limit:
            # Credits were given back, and have not come: the other direction of the same connection.
            yield _HangHop(on_edge, device, root(HangState.WAITS_FOR_EDGE))
        else:
            credit = on_edge._replace(state=HangState.WAITS_FOR_CREDIT)
            if not into.holders:
                yield _HangHop(credit, device, root(HangState.WAITS_FOR_CREDIT))
            for holder in sorted(into.holders):
                # One that holds a credit for what comes later in its order waits for this very message.
                yield _HangHop(credit, holder, root(HangState.WAITS_FOR_CREDIT) if holder == device else None)

    def _unsent(self, idle: HangRoot, wait: HangWait, before: int, sender: SeenWorker) -> Iterator[_HangHop]:
        """A message that could be sent and is not: its tensors may still be computed, on an accelerator."""
        assert sender.report is not None
        device = idle.device if before == BEGINNING else self._graph.tasks[before].lane.device
        queued = [each for each in sender.report.running if each.device == device]
        yield _HangHop(wait, device, _computing(sender, queued) if queued else idle)

    def _wait(self, task: int, worker: SeenWorker, state: HangState, before: int, sender: SeenWorker) -> HangWait:
        waiting = self._graph.tasks[task]
        awaited = "the beginning of the step there" if before == BEGINNING else self._graph.tasks[before].id
        return HangWait(waiting.id, waiting.lane.device, worker.name, state, awaited, sender.name)


def _unreachable(worker: SeenWorker, device: str) -> HangRoot | None:
    """The root, if the worker is gone or does not answer."""
    if not worker.lost and worker.report is not None:
        return None
    state = HangState.GONE if worker.lost else HangState.SILENT
    running = min(worker.running, key=lambda each: (each.device != device, -each.seconds), default=None)
    at, task = ("", "") if running is None else (running.device, running.name)
    return HangRoot(state, worker.name, at, task, seconds=worker.silent, detail=worker.lost)


def _computing(worker: SeenWorker, running: Sequence[RunningReport]) -> HangRoot:
    longest = max(running, key=lambda each: each.seconds)
    return HangRoot(HangState.COMPUTING, worker.name, longest.device, longest.name, seconds=longest.seconds)
