"""One stage in one forward, as a function of tensors that computes the same at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.errors import LossError, StageError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing
from asyncpipe.ops.autograd.random_streams import DeviceDraws, RandomStream, check_repeated, random_stream
from asyncpipe.ops.autograd.selective import SelectiveRuns
from asyncpipe.ops.execute.shared_values import Readers, as_they_are, refuse_overwriting, shared_readers
from asyncpipe.ops.execute.step_tensors import StepPlan
from asyncpipe.ops.model.buffers import BufferValues
from asyncpipe.ops.model.microbatch import Arguments, Packet
from asyncpipe.ops.model.nested import lost_attribute
from asyncpipe.ops.model.recomputed_layers import recomputing
from asyncpipe.ops.model.stage import CALLER, LOSS, Stage
from asyncpipe.ops.model.stage_compiler import CallKind
from asyncpipe.ops.torch_internals import version_of

__all__ = ["LossResult", "StageRun", "StageSetup"]

_Call = Callable[[Mapping[int, Any]], Mapping[int, Any]]
_NOTHING = nullcontext()


class LossResult(NamedTuple):
    """What the last stage returns to the caller in a step with a loss, if it is more than the loss."""

    loss: Tensor
    counted: Tensor | None
    output: Any


class StageSetup:
    """What all forwards of one stage in one step share; known before the first."""

    __slots__ = ("call", "context", "draws", "is_plain", "is_repeated", "kind", "notes", "plan", "splits_head", "stage")

    def __init__(
        self, stage: Stage, plan: StepPlan, context: CallerContext, draws: DeviceDraws, notes: StepNotes
    ) -> None:
        """``draws`` is what the tasks of the stage's device draw from."""
        self.notes = notes
        self.stage = stage
        self.plan = plan
        self.context = context
        self.draws = draws
        self.is_repeated = plan.training and plan.checkpoint is not CheckpointMode.NEVER
        """Whether forwards are recomputed."""
        self.is_plain = not self.is_repeated and context.is_plain and not stage.buffers.watches
        """Whether a forward is a mere call of the stage: nothing is to be entered around it, kept or compared."""
        self.call = stage.module.function()
        """What calls the stage's module, unless it is compiled."""
        self.kind = CallKind(not plan.whole_step, (context.autocasts, context.inference), plan.sizes, plan.batch_dim)
        """How compiled stages are called."""
        self.splits_head = stage.module.splits_head and plan.loss is not None and not plan.keep_outputs
        """Whether the loss calls the model's head."""


class StageRun:
    """The forward of one micro-batch, with the loss if the stage is the last.

    An autograd graph refers to this, which the garbage collector cannot see through. To avoid a cycle, this refers
    neither to the step's tables nor to the tensors that the caller gets.
    """

    __slots__ = (
        "_buffers", "_computed", "_drawn", "_generators", "_microbatch", "_received", "_selective", "_setup", "_target",
        "next_readers", "packets", "readers",
    )  # fmt: skip

    def __init__(
        self,
        setup: StageSetup,
        microbatch: int,
        received: Mapping[int, Packet],
        target: Arguments,
        readers: Readers,
    ) -> None:
        """``readers``: who else reads what the stage receives; empty if nobody does."""
        self.readers = readers
        self.packets: dict[int, Packet]
        """What the stage sends, without the tensors: autograd functions return only these, so they are returned."""
        self.next_readers: Mapping[int, Readers] | None = None
        """Who else reads what it sends, by user, if it is known that somebody does."""
        self._setup = setup
        self._microbatch = microbatch
        self._received = received
        self._target = target
        if not setup.is_plain:
            self._selective = SelectiveRuns() if setup.plan.checkpoint is CheckpointMode.SELECTIVE else None
            self._buffers: BufferValues = {}
            """What a recomputation needs to know of the stage's buffers."""
            self._generators: list[Tensor] = []
            """Where the generators of its modules were."""
            self._drawn: Sequence[Tensor] = ()
            """What a first run drew, which a recomputation must draw again."""
            self._computed: Sequence[Tensor | None] = ()
            """A sample of what it sent, which must come out again."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the stage sends.

        Runs on the device's thread; or, for a recomputation that no R task did, on a thread of the autograd engine.
        """
        setup = self._setup
        given = setup.stage.inputs.given(tensors, setup.is_repeated)
        if (compiler := setup.stage.compiler) is None:
            return self._run(tensors, given, setup.call)
        with compiler.prepared(given, setup.kind, self._microbatch, setup.notes.compilations) as call:
            return self._run(tensors, given, call)

    def _run(self, tensors: Sequence[Tensor], given: Sequence[Tensor], call: _Call) -> list[Tensor]:
        """``given`` are ``tensors`` or copies of them."""
        setup = self._setup
        stage = setup.stage
        if setup.is_plain:
            with setup.draws.during(self._microbatch, stage.position):
                flat = self._compute(tensors, given, call)
        else:
            random, i, j = None, self._microbatch, stage.position
            if setup.is_repeated:
                random = random_stream(setup.plan.seed, i, j, stage.device.physical)
            own = stage.generators.during(self._generators)
            with setup.context.entered(), random or setup.draws.during(i, j), stage.buffers.during(self._buffers), own:
                flat = self._compute(tensors, given, call)
                if random is not None:
                    if random.has_drawn:
                        setup.notes.drew.add(j)
                    self._draw_again(random)
            if random is not None:
                self._compute_again(flat)
        may_share = (len(flat) > 1 or self.readers) and CALLER not in self.packets
        if may_share and not (setup.is_repeated and is_recomputing()):
            sent = {user: packet.tensors for user, packet in self.packets.items()}
            self.next_readers = shared_readers(sent, given, self.readers)
        for packet in self.packets.values():
            packet.tensors = []
        return flat

    def _compute(self, tensors: Sequence[Tensor], given: Sequence[Tensor], call: _Call) -> list[Tensor]:
        """What ``packets`` hold from now on."""
        if self._setup.is_plain or self._selective is None:
            return self._computed_by(call, tensors, given)
        with self._selective.run():
            flat = self._computed_by(call, tensors, given)
        if CALLER in self.packets and is_checkpointing():
            # The caller may overwrite what it gets, and a product's output is kept for the second run.
            flat = [each if each.grad_fn is None else each.clone() for each in flat]
        return flat

    def _computed_by(self, call: _Call, tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        setup, stage = self._setup, self._setup.stage
        before = as_they_are(given) if self.readers else ()
        rest = iter(given)
        received = {source: packet.rebuild(rest) for source, packet in self._received.items()}
        if setup.splits_head:
            received[LOSS] = None
        alone = recomputing(stage.recomputed) if stage.recomputed and setup.plan.training else _NOTHING
        with stage.parameters.uncached(), alone:
            sent = call(received)
        stage.inputs.saw(tensors, given)
        if self.readers:
            refuse_overwriting(stage.index, self.readers, given, before)
        self.packets = packets = {user: Packet(value) for user, value in sent.items()}
        flat = _tensors(packets)
        if not flat:
            raise _without_tensors(stage.index, sent)
        if setup.plan.loss is not None and CALLER in packets:
            packets[CALLER] = Packet(self._loss(setup.plan, sent[CALLER]))
            flat = _tensors(packets)
        elif (attribute := next(filter(None, map(lost_attribute, flat)), None)) is not None:
            raise StageError(
                f"stage {stage.index} sends a tensor with the attribute {attribute!r}, which would not arrive; send "
                "that as a value of its own, in a tuple or dict, or split elsewhere"
            )
        if given is not tensors and is_checkpointing():
            # What is passed on as it is goes on as such: one that needs no gradient needs none behind the stage.
            passed = {id(copy): x for copy, x in zip(given, tensors, strict=True) if not version_of(copy)}
            flat = [passed.get(id(x), x) for x in flat]
        return flat

    def _loss(self, plan: StepPlan, output: Any) -> Any:
        """The loss of what the stage returns, or a ``LossResult``."""
        assert plan.loss is not None
        loss, count = _loss_and_count(plan.loss(output, *self._target.args, **self._target.kwargs))
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LossError("the loss does not depend on any parameter; does a stage or loss_fn detach its output?")
        if count is None and not plan.keep_outputs:
            return loss
        return LossResult(loss, count, output if plan.keep_outputs else None)

    def _draw_again(self, random: RandomStream) -> None:
        """In a first run, note what was drawn; in a second one, check that it was the same."""
        if is_checkpointing():
            self._drawn = random.drawn()
        elif is_recomputing():
            check_repeated(self._setup.stage.index, self._drawn, random.drawn())

    def _compute_again(self, flat: Sequence[Tensor]) -> None:
        """The same of what was computed."""
        if is_checkpointing():
            self._computed = self._setup.stage.outputs.sample(self._microbatch, flat)
        elif is_recomputing():
            self._setup.stage.outputs.compare(self._computed, flat)


def _tensors(packets: Mapping[int, Packet]) -> list[Tensor]:
    if len(packets) == 1:
        (packet,) = packets.values()
        return packet.tensors
    return [tensor for packet in packets.values() for tensor in packet.tensors]


def _without_tensors(index: int, sent: Mapping[int, Any]) -> StageError:
    value = next(iter(sent.values()), None)
    # A link with skips wraps the output; name the type that the module itself returned.
    kind = type(getattr(value, "output", value)).__name__
    return StageError(
        f"stage {index} returned {kind} without any tensor; a stage must return a tensor, or a nested tuple, list or "
        "dict that holds one"
    )


def _loss_and_count(returned: Any) -> tuple[Tensor, Tensor | None]:
    """The loss and its count, from what a loss function returned: a loss, or (mean loss, number of samples)."""
    loss, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor):
        raise LossError(f"loss_fn must return a tensor without dimensions, got a {type(loss).__name__}")
    if loss.dim():
        got = f"shape {tuple(loss.shape)}"
        raise LossError(f"loss_fn must return a tensor without dimensions, got {got}; reduce it to a scalar")
    if count is None:
        return loss, None
    # A number stays on the CPU: bringing it to the loss's device would make the host wait for the device.
    on_device = isinstance(count, Tensor) and not count.is_cpu
    count = torch.as_tensor(count, device=loss.device if on_device else "cpu").detach()
    if count.dim():
        raise LossError(f"loss_fn returned a count of shape {tuple(count.shape)}; it must be one number")
    return loss, count
