"""The options of a pipeline. Each is declared, documented and checked here and nowhere else.

``Pipeline(...)`` takes the fields of ``PipelineArguments`` as its arguments. To add an option, add a field here (or in
``pool_options.py``) and use it where it has its effect. Whether balance and schedule suit the model is checked in
``build.py``, also before anything runs or moves. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.core.compile_option import CompileOption
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.offload import check_offload
from asyncpipe.errors import MicrobatchError, OptionError
from asyncpipe.pipeline.pool_options import PoolOptions

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from asyncpipe.core.policies.share import Share
    from asyncpipe.core.records.step_record import Observer
    from asyncpipe.core.schedules.protocol import Schedule
    from asyncpipe.ops.model.feed import Feed
    from asyncpipe.ops.model.flops import FlopCount
    from asyncpipe.ops.model.stage import StagedModel
    from asyncpipe.ops.model.stage_factory import StageFactory
    from asyncpipe.pipeline.pool import DevicePool

__all__ = ["PipelineArguments", "PipelineOptions"]

_CLIPS = ("clip_grad_norm", "clip_grad_value")
_OF_OPTIMIZERS = (
    *("shard_optimizer", "undo_updates", "gradient_dtype", "optimizer_on_host", "parameter_groups", "lr_schedule"),
    *_CLIPS,
)
"""The options that mean nothing without ``optimizer``."""
_NOT_COPIED = {"copied": False}
"""Metadata of an option that a copy of the pipeline does not inherit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions(PoolOptions):
    """How a model is trained as a pipeline. Raises ``OptionError`` for values that are not allowed or not together."""

    microbatches: int
    """Into how many micro-batches a mini-batch is cut, for each replica; one with fewer samples makes fewer."""
    replicas: int = 1
    """How many pipelines, each with devices of its own, train one model: the micro-batches of a mini-batch are spread
    over them in order, and their gradients are summed."""
    total_microbatches: int | None = None
    """Into how many micro-batches a mini-batch is cut for all replicas together, where ``microbatches`` times
    ``replicas`` is not meant: some replicas then have one more than others."""
    balance: str | Sequence[int] = "auto"
    """Layers per stage, or ``"auto"``: with a ``sample`` the fastest by prediction, else parameters spread evenly. For
    a traced model, the number of stages that it was cut into per stage; ``"auto"`` without a ``sample`` is one each,
    unless it was cut finely, to choose among (transformers models, ``split="finest"``): then as for layers."""
    stages: int | None = None
    """How many stages; by default the length of ``balance``, or what the schedule puts on the devices."""
    schedule: str | Schedule = "1f1b"
    """A name (see ``known_schedules``), ``module:Class``, ``csv:FILE``, a ``Schedule``, or ``"auto"``: the fastest by
    prediction, which needs a ``sample``. With an ``optimizer`` steps are taken to overlap, as in ``steps``."""
    order: Literal["strict", "hint"] = "strict"
    """With ``"hint"`` the schedule's order only ranks the tasks that are ready."""
    checkpoint: str = "except_last"
    """Which micro-batches are recomputed: ``"always"``, ``"except_last"`` or ``"never"``. With ``"selective"`` all are,
    but what products, convolutions and attention have made is kept: more memory than ``"always"``, less time."""
    recompute_layers: Sequence[int | str] = ()
    """With ``checkpoint="never"``: layers that are recomputed in the backward all the same, each by itself. A number
    counts those of the model's outermost list of layers; a name, one of its ``named_modules()``, may have ``*``."""
    offload: float | Sequence[float] | Literal["auto"] | None = None
    """The fraction of micro-batches whose activations wait for their backward in the host's memory, from 0 to 1, or a
    list with that of each stage. Those that wait longest are offloaded, and none whose backward follows at once. Only
    in ``step`` and ``steps``, with an ordered schedule; on CPUs nothing moves. ``"auto"``, which needs a ``sample`` and
    a ``memory_limit``: as little as fits, if that is faster than what fits without."""
    memory_limit: int | None = field(default=None, metadata=_NOT_COPIED)
    """Bytes of each device that what is chosen by measuring may need, by prediction; by default any number."""
    loss_fn: Callable[..., Any] | None = None
    """Maps (output, target) of a micro-batch to a scalar, or to (mean, count): a mean over that many items of any kind
    (tokens, for instance). Counts make the mini-batch's mean right for micro-batches of any size."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """``"mean"`` if a scalar loss is a mean over samples (micro-batches then count by their size), or ``"sum"``."""
    on_nan: Literal["warn", "raise", "ignore"] = "warn"
    """What becomes of a mini-batch whose loss is not a number: a warning, the first time; or a ``LossError``, for which
    the host waits for the device in each step. Optimizers inside the step have updated the weights by then."""
    batch_dim: int = 0
    """The batch dimension of inputs, targets and outputs."""
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] | None = None
    """Makes a stage's optimizer from its parameters. The update is then a task of the step, which begins when the
    stage's last backward is done. ``Pipeline.optimizers`` has the optimizers by stage."""
    parameter_groups: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None
    """Maps the unsplit model's name of a parameter, and the parameter, to settings of its own, as ``lambda name,
    parameter: {"weight_decay": 0.0} if parameter.ndim < 2 else {}``. ``optimizer`` then gets a list of parameter groups
    (dicts), the same for each stage, of which some may be empty. A group with an ``lr`` keeps its ratio to the
    optimizer's where a step or ``LearningRates`` sets the learning rate. Shapes may be read, not values: where stages
    live in workers, parameters of others are on the meta device."""
    lr_schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    """Makes a stage's learning rate scheduler from its optimizer: a torch scheduler, for instance ``functools.partial(
    transformers.get_cosine_schedule_with_warmup, num_warmup_steps=100, num_training_steps=1000)``, or
    ``LearningRates(function of the step)``. It is stepped after each update of the stage, as part of it.
    ``Pipeline.schedule_states`` is its state."""
    clip_grad_norm: float | None = None
    """What the norm of all gradients of the model is at most when the pipeline's optimizers use them, as
    ``torch.nn.utils.clip_grad_norm_`` does it. Every update then waits for the norms of all stages, so where steps
    overlap the devices wait for each other once a step. ``StepResult.gradient_norm`` is the norm before clipping. One
    that is NaN or infinite makes gradients NaN, as it does in torch."""
    clip_grad_value: float | None = None
    """What the size of each number in these gradients is at most then. No stage waits for another."""
    shard_optimizer: bool = False
    """Whether each replica updates a part of the parameters, and has the optimizer's states of that part alone. For
    optimizers that update each element alone, as Adam does."""
    undo_updates: bool = False
    """Whether a failed step leaves parameters and these optimizers as they were before it, also where some stages were
    updated already. It costs a copy of both in each step."""
    gradient_dtype: Literal["bfloat16"] | None = None
    """As what replicas send each other the gradients that they add up: ``"bfloat16"`` is half of the bytes of float32,
    or a quarter of float64. The sum is in the parameter's own type, and travels so. Each replica's share is rounded,
    wherever it is added up. Gradients of other types travel as they are. For the pipeline's own optimizers."""
    optimizer_on_host: bool = False
    """Whether these optimizers are in the host's memory, with their states, and update there: the stages' devices have
    parameters and gradients alone, which travel in each update. Changes nothing on CPUs."""
    feed: str | Feed | None = None
    """Makes the mini-batches of steps that are given none, from their numbers: ``"module:function"`` or a ``Feed``. If
    the stages live in workers it is called there, so that no data passes this process."""
    gradient_norms: bool = False
    """Whether results have the norm of the gradients that each stage's optimizer has used, and cleared, before
    clipping (``StepResult.gradient_norms``)."""
    deferred_batch_norm: bool = False
    """Whether batch norms update their running statistics once per mini-batch, as the unsplit model does."""
    compile: bool | Mapping[str, Any] | Literal["cudagraphs"] = False
    """Whether each stage is compiled, in the process that has it: ``True``, or a dict of arguments for
    ``torch.compile`` (``fullgraph``, ``dynamic``, ``backend``, ``mode``, ``options``). ``"cudagraphs"`` captures each
    stage's kernels in CUDA graphs instead. A stage that is not one graph is an error, unless ``fullgraph`` is
    ``False``. ``Pipeline.compiled`` says what was compiled."""
    flops: FlopCount | None = None
    """How many floating-point operations the model needs, as ``asyncpipe.count_flops(model, batch)`` counts them:
    then reports and metrics have the MFU (``result.report.mfu``)."""
    peak_flops: float | None = None
    """The most operations a second of all devices together; by default by their names, for the GPUs that are known, in
    16 bits."""
    nvtx: bool = False
    """Whether tasks are NVTX ranges, for Nsight Systems. ``torch.profiler`` sees their names anyway."""
    sample_memory: bool = False
    """Whether the memory of the device is read after each task, for traces."""
    observers: Sequence[Observer] = field(default=(), metadata=_NOT_COPIED)
    """Called with the record of every completed step, on the driver's loop. No observer can fail or delay a step."""
    sample: tuple[Any, ...] | None = field(default=None, metadata=_NOT_COPIED)
    """``(x, target)`` or ``(x,)`` as a step will get it, of the same size. Copies of the model are measured with it,
    which blocks for some steps."""
    pool: DevicePool | None = field(default=None, metadata=_NOT_COPIED)
    """Devices that are shared with other pipelines. Takes the place of the options of ``PoolOptions``."""
    share: Share | None = field(default=None, metadata=_NOT_COPIED)
    """What the pipeline gets of the lanes of a shared pool."""
    generator: torch.Generator | None = field(default=None, metadata=_NOT_COPIED)
    """The CPU generator that all random draws of steps follow from; by default torch's."""

    def __post_init__(self) -> None:
        PoolOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        check_positive("microbatches", self.microbatches, MicrobatchError)
        check_positive("replicas", self.replicas)
        if self.total_microbatches is not None:
            check_positive("total_microbatches", self.total_microbatches, MicrobatchError)
        if self.stages is not None:
            check_positive("stages", self.stages)
        check_choice("order", self.order, ("strict", "hint"))
        CheckpointMode.parse(self.checkpoint)
        check_choice("on_nan", self.on_nan, ("warn", "raise", "ignore"))
        for name in _OF_OPTIMIZERS if self.optimizer is None else ():
            if getattr(self, name) not in (None, False):
                raise OptionError(f"{name} is for the pipeline's own optimizers; give it an optimizer=")
        if self.gradient_dtype is not None:
            check_choice("gradient_dtype", self.gradient_dtype, ("bfloat16",))
        for name in ("parameter_groups", "lr_schedule"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise OptionError(f"{name} must be a function, which is called where the stages are, got {kind}")
        for name in _CLIPS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise OptionError(f"{name} must be a positive number, got {value!r}")
        if None not in (self.clip_grad_norm, self.clip_grad_value):
            raise OptionError("clip_grad_norm and clip_grad_value would clip one after the other; give one of them")
        if CompileOption.parse(self.compile) is not None and self.offload is not None:
            raise OptionError(
                "offload takes what autograd saves for each operator, and compiled stages are one each; leave one out"
            )
        if self.recompute_layers and (self.checkpoint != CheckpointMode.NEVER or self.compile):
            raise OptionError(
                "recompute_layers recomputes these layers and keeps all others: give checkpoint='never' with it, and "
                "leave compile out"
            )
        if self.checkpoint == CheckpointMode.SELECTIVE and (self.offload is not None or self.compile):
            raise OptionError(
                "checkpoint='selective' chooses among single operators, which offload does not see and compiled stages "
                "do not have; leave offload and compile out, or give checkpoint='always'"
            )
        if self.memory_limit is not None:
            check_positive("memory_limit", self.memory_limit)
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise OptionError(f"peak_flops must be more than 0, got {self.peak_flops!r}")
        if self.offload == "auto":
            if self.memory_limit is None or self.sample is None:
                raise OptionError(
                    "offload='auto' offloads what does not fit by measuring the model; give a memory_limit and a "
                    "sample=(x, target) of what steps will get"
                )
        elif self.offload is not None:
            check_offload(self.offload)
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        if isinstance(self.batch_dim, bool) or not isinstance(self.batch_dim, int) or self.batch_dim < 0:
            raise OptionError(f"batch_dim must be an integer from 0, got {self.batch_dim!r}")
        if self.is_auto:
            self._check_auto()
        given = [each.name for each in fields(PoolOptions) if getattr(self, each.name) != each.default]
        if self.pool is not None and given:
            raise OptionError(f"{', '.join(given)}: a pipeline on a pool takes these from it; give them to DevicePool")

    def _check_auto(self) -> None:
        if self.sample is None:
            raise OptionError("schedule='auto' measures the model; give a sample=(x, target) of what steps will get")
        if not isinstance(self.sample, tuple) or len(self.sample) not in (1, 2):
            raise OptionError(
                f"sample must be a tuple (x, target), or (x,) without a target, got {type(self.sample).__name__}"
            )
        if not isinstance(self.schedule, str) or self.order != "strict" or self.stages is not None:
            raise OptionError(
                "'auto' with a sample chooses among schedules by name, in their strict order, with any number of "
                "stages; leave out order and stages, or give the balance as a list and leave out the sample"
            )

    @property
    def pieces(self) -> int:
        """Into how many micro-batches a mini-batch is cut, for all replicas together."""
        return self.total_microbatches or self.microbatches * self.replicas

    @property
    def is_auto(self) -> bool:
        """Whether the schedule or the balance is still to be chosen by measuring."""
        chosen = self.schedule == "auto" or self.offload == "auto"
        return chosen or (self.balance == "auto" and self.sample is not None)

    @property
    def pool_options(self) -> dict[str, Any]:
        """Arguments for a ``DevicePool`` of the pipeline's own."""
        return {each.name: getattr(self, each.name) for each in fields(PoolOptions)}

    def for_copy(self) -> Self:
        """The options of a copy of the pipeline: without observers, shared pool and generator."""
        left_out: dict[str, Any] = {f.name: f.default for f in fields(self) if not f.metadata.get("copied", True)}
        return replace(self, **left_out)

    def for_worker(self, schedule: Schedule) -> PipelineOptions:
        """The options in a worker, which has the stages as they were cut; the caller's own objects stay here."""
        values = {each.name: getattr(self, each.name) for each in fields(PipelineOptions)}
        values.update((each.name, each.default) for each in fields(PoolOptions))
        values.update(
            (each.name, each.default) for each in fields(PipelineOptions) if not each.metadata.get("copied", True)
        )
        cut = {"stages": None, "balance": "auto", "deferred_batch_norm": False, "order": "strict"}
        return PipelineOptions(**values | cut | {"schedule": schedule, "on_nan": "ignore"})


@dataclass(frozen=True, slots=True)
class PipelineArguments(PipelineOptions):
    """All arguments of ``Pipeline``."""

    model: nn.Module | Sequence[nn.Module] | StagedModel | StageFactory
    """An ``nn.Sequential``, a list of modules, or a module cut by ``asyncpipe.trace``. It is moved to the devices in
    place and stays the owner of its parameters. A parameter may be tied across stages and devices. A ``StageFactory``
    builds each stage in the process that has it."""
    devices: Sequence[str | torch.device] | Sequence[Sequence[str | torch.device]]
    """Logical devices, e.g. ``["cuda:0", "cuda:1"]`` or ``["cpu:0", "cpu:1"]``; a device may be listed twice. With
    replicas a list of lists, one for each, or all devices of the first replica, then those of the second …"""

    @property
    def flat_devices(self) -> Sequence[str | torch.device]:
        """The devices of all replicas, one replica after the other."""
        flat: list[Any] = []
        if isinstance(self.devices, str):
            return self.devices  # The pool says what is wrong.
        for row in self.devices:
            flat += row if isinstance(row, list | tuple) else [row]
        return flat

    def by_row(self) -> Self:
        """These arguments, with as many replicas as there are lists of devices.

        Raises ``OptionError`` where the lists are not of one length, or not as many as ``replicas``.
        """
        lengths = [len(row) for row in self.devices if isinstance(row, list | tuple)]
        if lengths and (len(lengths) != len(self.devices) or len(set(lengths)) > 1):
            raise OptionError(
                f"each replica needs a list of as many devices as the others, got {list(self.devices)}; give, for "
                "instance, [['cuda:0', 'cuda:1'], ['cuda:2', 'cuda:3']]"
            )
        replicas = len(lengths) or self.replicas
        if self.replicas not in (1, replicas):
            raise OptionError(
                f"replicas={self.replicas} does not go with {len(lengths)} lists of devices; leave it out"
            )
        if len(self.flat_devices) % replicas:
            raise OptionError(f"{replicas} replicas cannot share {len(self.devices)} devices evenly; give each as many")
        return replace(self, replicas=replicas)
