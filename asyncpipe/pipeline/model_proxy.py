"""The model's own methods and attributes, as a pipeline offers them: modes, parameters, state, layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn, Self

from torch import nn

from asyncpipe.errors import MoveError, OptionError
from asyncpipe.ops.execute.optimizer_states import check_optimizer_states, states_by_name
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import Stage
from asyncpipe.ops.torch_internals import parse_to
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.call import call
from asyncpipe.pipeline.feeding import Feeding
from asyncpipe.pipeline.generate import Generation
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.remote_stages import RemoteStages
from asyncpipe.pipeline.saving import Saves
from asyncpipe.pipeline.stages_here import StagesHere

__all__ = ["OPTIMIZER", "ModelProxy"]

OPTIMIZER = "give the pipeline an optimizer= and use step()"
"""In the place of an optimizer of the caller's own."""


class ModelProxy:
    """Stands for the model of a pipeline, and is called as the model is."""

    def __init__(
        self, parts: PipelineParts, tenancy: Tenancy, feeding: Feeding, stages: StagesHere, saves: Saves
    ) -> None:
        """``stages`` are those of this process, or ``RemoteStages``."""
        self._parts = parts
        self._tenancy = tenancy
        self._pool = tenancy.pool
        self._feeding = feeding
        self._backend = stages
        self._saves = saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as part of the caller's autograd graph: ``loss_fn(pipe(x)).backward()`` trains.

        Forward, recompute, backward and copies are tasks as in ``step``; the backward graph runs while the autograd
        engine is in the caller's ``backward``. Gradients flow on to inputs that require them. ``torch.no_grad``,
        ``inference_mode``, autocast and ``eval()`` do what they do to the model itself; nothing is recomputed in
        evaluation mode. Blocks the calling thread. If the only argument is ``Microbatches``, the output is a list with
        one entry for each. Outputs without dimensions are stacked, but a ``loss`` is one number, weighted as in
        ``step``.

        Raises ``BatchError`` before anything runs and ``TaskError`` if a task fails, here or from ``backward``; then
        the gradients are what they were before. ``BackwardError`` says what autograd cannot do here: a second
        backward without ``retain_graph``, double backward.
        """
        self._backend.refuse("pipe(x), whose loss and backward are the caller's,", OPTIMIZER)
        return call(self._parts, self._tenancy, Arguments(args, kwargs))

    def _generation(self, inputs: Any, options: Mapping[str, Any]) -> Generation:
        self._backend.refuse("generate, whose caches are in the stages,", "load what save_pretrained() has written")
        return Generation(self._parts, self, inputs, options)

    @property
    def steps_done(self) -> int:
        """How many training steps are done, with those before a ``load``."""
        return self._feeding.steps

    @property
    def feed_step(self) -> int:
        """The number that the feed gets for the next step that it makes a mini-batch for, from 0.

        A step that fails or is cancelled does not count. Set it to go on from a snapshot.
        """
        return self._feeding.step

    @feed_step.setter
    def feed_step(self, number: int) -> None:
        self._parts.check_between_steps()
        self._feeding.step = number

    @property
    def module(self) -> nn.Module:
        """The unsplit model; it owns the parameters."""
        return self._parts.module

    @property
    def stages(self) -> Sequence[Stage]:
        """The placed stages, in order."""
        return self._parts.resources.stages

    @property
    def training(self) -> bool:
        """Whether steps train."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as ``nn.Module.train``."""
        self._parts.check_between_steps()
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode: steps run forwards only."""
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast the model, as ``nn.Module.to(dtype)``; raises ``MoveError`` for a device: stages stay on theirs."""
        try:
            device, dtype = parse_to(*args, **kwargs)
            stays = device is None and dtype is not None
        except RuntimeError:  # the device does not exist
            stays = False
        if not stays:
            raise MoveError("a pipeline's stages stay on their devices; to() takes a dtype alone")
        self._parts.check_between_steps()
        self._backend.refuse("to()", "cast the model before you give it to the pipeline, or in its StageFactory")
        if self._parts.options.shard_optimizer:
            raise OptionError("to() would leave the replicas' parts of the optimizer behind; cast the model before")
        for module in (self.module, *self._parts.staged.stages):
            module.to(dtype)
        return self

    @property
    def remote(self) -> RemoteStages | None:
        """The stages in workers, if they live there."""
        return self._backend if isinstance(self._backend, RemoteStages) else None

    def cuda(self, *_: Any) -> NoReturn:
        """Raises ``MoveError``."""
        raise MoveError("a pipeline's stages stay on their devices; give the pipeline other ones")

    cpu = cuda

    def __len__(self) -> int:
        """The number of the model's layers; of a traced model, of its stages."""
        return len(self._layers())

    def __getitem__(self, index: int) -> nn.Module:
        """A layer of the model, or a stage of a traced one."""
        return self._layers()[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def _layers(self) -> Sequence[nn.Module]:
        return list(self.module) if isinstance(self.module, nn.Sequential) else [stage.module for stage in self.stages]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, for an optimizer; ``OptionError`` if they are in workers."""
        self._backend.refuse("parameters()", OPTIMIZER)
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under the unsplit model's names; as ``parameters``."""
        self._backend.refuse("named_parameters()", OPTIMIZER)
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The state under the unsplit model's keys; tensors are where their stages are, or copies
        on the CPU if these are in workers.

        Raises ``OverlapError`` between two results of ``steps``, while a later step computes. If the stages live in
        workers, ``PipelineClosedError`` after closing, and for a ``StageFactory`` before opening.
        """
        self._parts.check_between_steps()
        return self._backend.values.state()

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load a state with the unsplit model's keys, from any device."""
        self._parts.check_between_steps()
        self._backend.values.load_state(state, strict=strict)

    def save_pretrained(self, folder: str | PathLike[str], **options: Any) -> None:
        """Write a model of transformers, or the adapters of a ``PeftModel``, so that ``from_pretrained`` reads it.

        ``options`` are those of the model's own ``save_pretrained``. Raises as ``state_dict``, and ``OptionError`` for
        another model.
        """
        write = getattr(self.module, "save_pretrained", None)
        if write is None:
            raise OptionError(
                f"{type(self.module).__name__} has no save_pretrained, which is for models of transformers; save "
                "state_dict()"
            )
        write(folder, state_dict=self.state_dict(), **options)

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """What the pipeline's own optimizers remember, by the unsplit model's name of each parameter.

        So it means the same with other stages, devices or workers. Settings, such as the learning rate, are not in it.
        Tensors are where ``state_dict`` has those of the model; it raises as that.
        """
        self._parts.check_between_steps()
        return self._backend.values.optimizer_states()

    def load_optimizer_states(self, states: Mapping[str, Any], *, strict: bool = True) -> None:
        """Give the pipeline's own optimizers copies of what ``optimizer_states`` returned, from any device.

        ``states`` may also be the ``state_dict()`` of one optimizer over the unsplit model. Raises ``StateDictError``
        for names or shapes that the trained parameters do not have. If ``strict``, also where a parameter has no state
        in it that has one now; otherwise that is forgotten.
        """
        self._parts.check_between_steps()
        values = self._backend.values
        named = states_by_name(states, self.module)
        check_optimizer_states(named, self.module, values.optimizer_states if strict else lambda: ())
        values.load_optimizer_states(named)

    def schedule_states(self) -> dict[str, Any]:
        """Where the schedules of ``lr_schedule`` are, and what they have set; empty without ``lr_schedule``.

        It means the same with other stages, devices or workers. Raises as ``state_dict``.
        """
        self._parts.check_between_steps()
        return self._backend.values.schedule_states()

    def load_schedule_states(self, states: Mapping[str, Any]) -> None:
        """Have the schedules go on from what ``schedule_states`` returned.

        Raises ``StateDictError`` where that is empty and the pipeline has schedules, or the other way round, and for
        another number of parameter groups.
        """
        self._parts.check_between_steps()
        self._backend.check_schedules(states)
        self._backend.values.load_schedule_states(states)
