"""Everything that the package uses of torch that torch does not promise to keep, in one place.

No other module of the package reaches a private name of torch; ``tests/ops/test_torch_versions.py`` searches for them.
``tests/support/torch_names.py`` lists the names by the mechanism that needs them: why, since which torch they exist,
the test that fails when they change, and the slower public way that is taken where one is missing. Where there is no
public way, the names are in ``NEEDED``, so that one sentence refuses an unsuitable torch at the import.

Not listed are the tables of ``nn.Module`` (``_modules``, ``_parameters``, ``_buffers``): pickled modules contain them.

Some code recognises things of torch by a name or a text, which may change as well: nodes of autograd
(``autograd/split_backward.py``, ``model/stage_compiler.py``), operators that run a graph in a mode
(``model/trace/graph_writer.py``), failed guards of a trace (``model/trace/inputs.py``), a write into a leaf
(``execute/compute.py``), errors of CUDA (``device/device_errors.py``). The tests of these modules see a change.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

NEEDED = """
    autograd.Variable._execution_engine.run_backward autograd.graph.Node._input_metadata
    _C._profiler._RecordFunctionFast
    autograd.Variable._execution_engine.queue_callback _C._current_graph_task_id
    _C._autograd._get_current_graph_task_keep_graph _C._len_torch_dispatch_stack _C._len_torch_function_stack
    _C._pop_torch_function_stack _C._push_on_torch_function_stack _C._autograd._pop_saved_tensors_default_hooks
    _C._autograd._push_saved_tensors_default_hooks _C._autograd._top_saved_tensors_default_hooks
    overrides._get_current_function_mode_stack utils._device.DeviceContext
    utils._python_dispatch._disable_current_modes _C._functorch.is_batchedtensor
    _C._functorch.is_legacy_batchedtensor _C._functorch.peek_interpreter_stack
    autograd.forward_ad._current_level Tensor._version UntypedStorage._cdata Tensor._backward_hooks
    Tensor._post_accumulate_grad_hooks random.default_generator utils.checkpoint.CheckpointFunction
    nn.Module._compiled_call_impl nn.modules.module._global_backward_hooks
    nn.modules.module._global_backward_pre_hooks nn.modules.module._global_forward_hooks
    nn.modules.module._global_forward_pre_hooks nn.modules.batchnorm._BatchNorm _C._nn._parse_to
    utils._python_dispatch.TorchDispatchMode Tensor._indices Tensor._values _foreach_add_ _foreach_norm
    nn.utils.parametrize._cache_enabled utils._pytree.SUPPORTED_NODES utils._pytree.TreeSpec
    utils._pytree.tree_flatten utils._pytree.tree_leaves utils._pytree.tree_unflatten
""".split()
"""Names below ``torch`` without which something would be wrong, and for which there is no public way."""


def check_torch(found: Any) -> None:
    """Raise ``ImportError`` for a torch that is too old, or that has lost one of the names that are ``NEEDED``."""
    version = str(found.__version__)
    works = "asyncpipe works with torch 2.9 and newer (tested: 2.9, 2.13 and 2.15)"
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 9):
        raise ImportError(f"{works}; torch {version} is too old")
    for name in NEEDED:
        try:
            attrgetter(name)(found)
        except AttributeError:
            raise ImportError(f"{works}; torch {version} has no torch.{name}, install one of those") from None


check_torch(torch)


# Draws


class _SlotOfTorch:
    """A slot in the state that torch hands to its own threads: those of autograd and of ``torch.jit.fork``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._get, self._has = torch._C._get_obj_in_tls, torch._C._is_key_in_tls
        self._put = with_reference(torch._C._stash_obj_in_tls, name)
        self._remove: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)

    def get(self) -> Any:
        return self._get(self.name) if self._has(self.name) else None

    def put(self, value: object) -> None:
        # Not ``None`` in it, where torch can help it: a thread that ends drops what is there, for which it needs the
        # interpreter. That may be at its end, and the process would abort.
        if value is None and self._remove is not None:
            self._remove(self.name)
        else:
            self._put(self.name, value)


def with_reference(put: Callable[[str, object], None], slot: str) -> Callable[[str, object], None]:
    """``put``, taking a reference for the slot. Up to torch 2.11 it takes none, but drops one when the slot changes."""
    add_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

    def put_with_reference(slot: str, value: object) -> None:
        add_reference(value)
        put(slot, value)

    probe = object()
    before = sys.getrefcount(probe)
    put_with_reference(slot, probe)
    # Where torch takes its own reference, too, this probe is never freed.
    balanced = put if sys.getrefcount(probe) == before + 2 else put_with_reference
    balanced(slot, None)
    return balanced


class _PlainSlot(threading.local):
    _value: object = None

    def get(self) -> Any:
        return self._value

    def put(self, value: object) -> None:
        self._value = value


KernelFor = Callable[[str, list[Any]], Callable[..., Any] | None]
"""From an operator's name and arguments to its kernel, or ``None`` if it needs none.

A kernel is called with the operator, the set of keys and the arguments.
"""


class DrawsKey:
    """A key of torch's dispatcher that each thread can switch on for itself.

    Operators of ``aten`` have the kernels that are given to ``register``; all others pass the key by. Raises
    ``AttributeError`` or ``RuntimeError`` where torch lacks something of it.
    """

    NAME = "TESTING_ONLY_GenericMode"

    def __init__(self) -> None:
        self.key = torch._C._dispatch_key_parse(self.NAME)
        self._below = torch._C._dispatch_keyset_full_after(self.key)
        self._python = torch._C.DispatchKey.Python
        self._mode_of: Callable[[Any], object] = torch._C._get_dispatch_mode
        modes = torch._C._TorchDispatchModeKey
        self._tracing = [modes.FAKE, modes.PROXY, modes.FUNCTIONAL]
        self._is_off: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
        self._switch: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
        self._has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
        self._higher = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS, torch._ops._higher_order_ops
        self._all = torch._C._dispatch_get_all_op_names, torch._C._jit_get_all_schemas
        self.slot = _SlotOfTorch("asyncpipe: own draws")

    def switch(self, on: bool) -> None:
        """Have this thread's operators go through the key from now on, or no longer."""
        self._switch(self.key, on)

    def register(self, kernel_for: KernelFor) -> list[torch.library.Library]:
        """Give operators that are not composed of others the kernels of ``kernel_for``, as long as the result lives."""
        library_of: Any = torch.library.Library
        others = library_of("_", "IMPL", self.NAME)
        others.fallback(torch.library.fallthrough_kernel)
        # Higher-order operators (torch.cond) do not know the dispatcher's fallbacks.
        fall_through, higher_order = self._higher
        fall_through.append(self.key)
        for higher in higher_order.values():
            higher.fallthrough(self.key)  # type: ignore[no-untyped-call]
        library = library_of("aten", "IMPL", self.NAME)
        names, schemas = self._all
        known = set(names())
        for schema in schemas():
            full_name = f"{schema.name}.{schema.overload_name}".rstrip(".")
            namespace, _, name = schema.name.partition("::")
            if namespace != "aten" or full_name not in known:
                continue
            is_composite = self._has_kernel(full_name, "CompositeImplicitAutograd")
            if not is_composite and (kernel := kernel_for(name, schema.arguments)) is not None:
                operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
                library.impl(operator, partial(kernel, operator), with_keyset=True)
        return [others, library]

    def redispatch(self, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the operator as if there were no such key."""
        return operator.redispatch(keys & self._below, *args, **kwargs)

    def runs_python(self, keys: Any) -> bool:
        """Whether a dispatch mode, or a tensor with ``__torch_dispatch__``, comes next."""
        return bool(keys.has(self._python))

    def is_tracing(self, keys: Any = None) -> bool:
        """Whether the operator is not computed, but recorded: a generator must not get into the recording.

        Without ``keys`` for what Python code calls.
        """
        return (keys is None or self.runs_python(keys)) and any(
            self._mode_of(mode) is not None for mode in self._tracing
        )

    def is_off_in_python(self) -> bool:
        """Whether this thread is in code of a dispatch mode or of ``__torch_dispatch__``, which calls no kernel."""
        return self._is_off(self.key)

    def wrap_python_calls(self, operator: Any, call: Callable[..., Any]) -> None:
        """From now on, ``operator(...)`` in Python is ``call(function, ...)`` with the function that it was."""
        operator._op = _SameHash(call, operator._op)


class _SameHash(partial[Any]):
    """Has the hash of its first argument: that is the hash of the operator that calls it, which is in tables."""

    def __hash__(self) -> int:
        return hash(self.args[0])


def _draws_key() -> DrawsKey | None:
    with suppress(AttributeError, RuntimeError):
        return DrawsKey()
    return None


DRAWS = _draws_key()
"""``None`` where this torch has no such key: tasks on a CPU then take turns at the default generator."""


def thread_slot() -> _SlotOfTorch | _PlainSlot:
    """A place of each thread for one object, ``None`` at first; torch hands it to its own threads if it can."""
    return _PlainSlot() if DRAWS is None else DRAWS.slot


def is_default_generator(generator: Any) -> bool:
    """Whether it is torch's for CPUs. The dispatcher makes another Python object of it."""
    default: Any = torch.default_generator
    return bool(generator._cdata == default._cdata)


# Streams


@cache
def stream_functions(kind: str) -> tuple[Callable[[int], Any], Callable[[Any], object], Callable[[Any], Any]]:
    """For a type of device: what is current on a device (-1: the current one), what makes that current, and what
    stands for a stream there."""
    get, put = getattr(torch._C, "_cuda_getCurrentStream", None), getattr(torch._C, "_cuda_setStream", None)
    if kind == "cuda" and get and put:

        def put_place(place: tuple[int, int, int]) -> None:
            put(stream_id=place[0], device_index=place[1], device_type=place[2])

        return get, put_place, attrgetter("stream_id", "device_index", "device_type")
    module = torch.get_device_module(kind)
    return lambda index: module.current_stream(None if index < 0 else index), module.set_stream, lambda stream: stream


class CurrentStream:
    """A context in which a stream is current on the calling thread, and its device. To be entered once."""

    __slots__ = ("_here", "_put", "_stream", "_there")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream, device = self._stream, self._stream.device
        get, self._put, place = stream_functions(device.type)
        self._here, self._there = get(-1), get(device.index)
        self._put(place(stream))

    def __exit__(self, *_: object) -> None:
        self._put(self._there)
        self._put(self._here)


# Autograd

_engine: Any = torch.autograd.Variable._execution_engine
run_engine: Callable[..., object] = _engine.run_backward
queue_callback: Callable[[Callable[[], object]], None] = _engine.queue_callback
"""Have the engine call something at the end of the pass that runs on this thread; or drop it, if the pass fails."""
pass_number: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the engine's pass that runs on this thread."""
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether that pass was started with ``retain_graph``."""


def input_metadata(node: Node, position: int) -> Any:
    """The shape, type and device of the gradient that ``node`` takes at ``position``."""
    return node._input_metadata[position]


@contextmanager
def without_modes_and_hooks() -> Iterator[None]:
    """Inside, modes of functions and dispatch, and hooks for saved tensors, that were entered around it do not act."""
    functions = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.append(pair)
    try:
        if torch._C._len_torch_dispatch_stack():
            with torch.utils._python_dispatch._disable_current_modes():
                yield
        else:
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        for mode in reversed(functions):
            torch._C._push_on_torch_function_stack(mode)


def inside_modes() -> str:
    """The name of a mode that acts on this thread, of functions or dispatch; not of ``torch.device``. Empty if none."""
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            if not isinstance(mode, DeviceContext):
                return type(mode).__name__
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode"
    return ""


def default_device() -> torch.device | None:
    """Where ``torch.device`` or ``torch.set_default_device`` has this thread make tensors; ``None`` if nothing has."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def inside_transform() -> bool:
    """Whether this thread is inside a transform of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_forward_derivatives() -> bool:
    """Whether this thread is inside ``torch.autograd.forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Whether ``gradient`` is a batch of gradients that looks like one: of a vmap, or of ``is_grads_batched``."""
    kinds = torch._C._functorch
    return bool(kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient))


# Tensors and modules

plain_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, functions of torch do to a subclass of ``Tensor`` what they do to a ``Tensor``."""
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Raises ``RuntimeError`` for one of inference mode."""
gradient_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], object]] | None] = attrgetter("_backward_hooks")
"""The hooks of ``register_hook``."""
accumulated_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], object]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks of ``register_post_accumulate_grad_hook``."""


add_to_each: Callable[..., Any] = torch._foreach_add_
"""Adds each of the second tensors to one of the first, all of one device and type, as ``add_`` does."""

norm_of_each: Callable[..., list[Tensor]] = torch._foreach_norm  # type: ignore[assignment]
"""The norms of tensors, as ``torch.linalg.vector_norm`` takes them."""


def caches_parametrizations() -> bool:
    """Whether any thread is inside ``torch.nn.utils.parametrize.cached()``."""
    return bool(nn.utils.parametrize._cache_enabled)


BatchNorm = nn.modules.batchnorm._BatchNorm
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")


def storage_id(tensor: Tensor) -> int:
    """The identity of the memory of a strided tensor, also of one that is traced, as long as it is there."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def hooks_of(module: nn.Module, kinds: Iterable[str] = (*FORWARD_HOOKS, *BACKWARD_HOOKS)) -> list[Callable[..., Any]]:
    """The hooks that ``module`` has itself."""
    return [hook for kind in kinds for hook in getattr(module, kind).values()]


def hooks_of_all_modules() -> bool:
    """Whether there is a hook for all modules (``register_module_forward_hook``)."""
    return any(getattr(nn.modules.module, f"_global{kind}") for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS))


def has_own_call(module: nn.Module) -> bool:
    """Whether ``module.compile()`` has replaced what a call of it does."""
    return module._compiled_call_impl is not None


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers of ``module`` that its state leaves out."""
    return module._non_persistent_buffers_set


def refresh_flat_weights(module: nn.Module) -> None:
    """Have a recurrent layer use the parameters that it has now: it has a second reference to them, in a list."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the type in arguments of ``nn.Module.to``. Raises ``RuntimeError`` for an unknown device."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def device_of_scaler(scaler: torch.amp.GradScaler) -> str:
    """The type of device that the factor of ``scaler`` is on."""
    return scaler._device


# Traces


def operator_schema(operator: Any) -> Any:
    """The arguments and results of an operator of a graph; ``None`` for what is no operator."""
    return getattr(operator, "_schema", None)


def is_metadata_check(node: fx.Node) -> bool:
    """Whether a node of a trace only checks the type and device of a tensor."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def is_of_transform(node: fx.Node) -> bool:
    """Whether a node of a trace begins or ends a transform of ``torch.func``."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


# Compilation

CAPTURES_HAVE_SEEDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
"""Whether each CUDA graph has memory of its own for the seed of its draws."""


def compile_settings(wanted: Mapping[str, object]) -> AbstractContextManager[None]:
    """Settings of the compiler inside. Leaves out what an older torch does not know."""
    config: Any = torch._functorch.config
    known = {name: value for name, value in wanted.items() if hasattr(config, name)}
    return cast("AbstractContextManager[None]", config.patch(known))


def compile_backend(
    name: str | Callable[..., Any], mode: str | None, options: dict[str, Any], dynamic: bool | None
) -> Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]:
    """What compiles a graph, as ``torch.compile`` would. Raises for an unknown backend or option."""
    if name == "inductor":
        made: Any = torch._TorchCompileInductorWrapper(mode, None, dynamic)  # type: ignore[no-untyped-call]
        made.apply_options(options)
    else:
        made = torch._TorchCompileWrapper(name, None, options or None, dynamic)  # type: ignore[no-untyped-call]
    return cast("Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]", made)


def end_compiler_threads() -> None:
    """End the threads in which inductor has started C++ compilers; it starts others when it needs them."""
    module: Any = sys.modules.get("torch._inductor.async_compile")
    pool = module and module.AsyncCompile.pool
    if pool and pool.cache_info().currsize:
        ended = pool()
        pool.cache_clear()
        ended.shutdown()


def has_cpp_compiler() -> bool:
    """Whether inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def has_triton() -> bool:
    """Whether inductor can use Triton here."""
    return torch.utils._triton.has_triton()


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Have the next compilation take a dimension of ``tensor`` as any size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def compiler_error(error: Exception) -> str | None:
    """What the compiler says of code that it cannot compile; ``None`` if the error is one of the code itself."""
    kinds: Any = torch._dynamo.exc
    if isinstance(error, kinds.FailOnRecompileLimitHit):
        config: Any = torch._dynamo.config
        return f"calls of one kind were compiled {config.recompile_limit} times already; {recompile_reason()}"
    if isinstance(error, kinds.TorchDynamoException):
        return f"{error}\n(compile={{'fullgraph': False}} allows several graphs)"
    return None


def break_reasons() -> dict[str, int]:
    """Why graphs were broken so far, and how often."""
    counters: Any = torch._dynamo.utils.counters
    return dict(counters["graph_break"])


def recompile_reason() -> str:
    """Why the last compilation was not the first of its code."""
    with suppress(Exception):
        metrics: Any = torch._dynamo.utils.get_compilation_metrics()
        for each in reversed(metrics):
            if reason := getattr(each, "recompile_reason", None):
                return " ".join(str(reason).split("User stack trace")[0].split())
    return "something that it depends on has changed"


# Sparse and jagged tensors


def sparse_parts(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and values of a sparse tensor, where one index may come several times."""
    return gradient._indices(), gradient._values()


def jagged_like(tensor: Tensor, other: Any) -> Tensor:
    """The values of a jagged tensor with the sizes of ``other``, a jagged tensor of the same rows."""
    values, offsets, lengths = tensor.values(), other.offsets(), other.lengths()
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=other._ragged_idx)


# Profilers and process groups

record_function: Callable[[str], AbstractContextManager[object]] = torch._C._profiler._RecordFunctionFast
"""A name for profilers around what runs inside."""


share_storage: Callable[[Any], tuple[Any, ...]] = torch.UntypedStorage._share_cuda_
"""The handles by which another process opens the memory of a storage on a GPU."""
open_storage: Callable[..., torch.UntypedStorage] = torch.UntypedStorage._new_shared_cuda
"""The storage of another process, as if it were on a device, by the device's number and the handles behind theirs."""
forget_storage: Callable[..., object] = torch.UntypedStorage._release_ipc_counter_cuda
"""Take back what another process holds of a storage that was shared, by the handle and the place of its counter."""


def nccl_options(limit: timedelta) -> Any:
    """Options of a group of NCCL whose collectives may take ``limit``."""
    group: Any = torch.distributed.ProcessGroupNCCL
    options = group.Options()
    options._timeout = limit
    return options


GROUP_CALLS = (
    "allreduce allreduce_coalesced allgather _allgather_base all_gather_single all_gather_single_coalesced "
    "allgather_coalesced allgather_into_tensor_coalesced alltoall alltoall_base all_to_all_single barrier broadcast "
    "gather reduce reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced scatter send recv recv_anysource"
).split()
"""The methods of a process group that communicate, in all versions of torch."""


def gloo_group(store: Any, rank: int, size: int, address: str, seconds: float) -> Any:
    """A process group of gloo for tensors on the host, which others reach at ``address``. Blocks so long at most."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    usual, options._timeout = options._timeout, timedelta(seconds=seconds)
    group, hash_store = torch.distributed.ProcessGroup, torch.distributed.HashStore  # type: ignore[attr-defined]
    made: Any = group(hash_store(), rank, size)
    kind = group.BackendType.GLOO
    backend = gloo(store, rank, size, options)
    backend.set_timeout(usual)
    made._register_backend(torch.device("cpu"), kind, backend)
    made._set_default_backend(kind)
    return made
