"""Private names of torch that ``asyncpipe/ops/torch_internals.py`` uses, by the mechanism that needs them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Internals:
    """Private names of torch that one mechanism needs."""

    names: str
    """Below ``torch``, separated by spaces. One that begins with a dot is an attribute of objects."""
    why: str
    test: str
    """The name of a test that fails where one of them has changed its meaning."""
    instead: str = ""
    """What happens where one is missing: the slower public way. If empty, the names are ``NEEDED``."""
    since: str = "2.9 or before"
    """The first torch that has all of them."""


INTERNALS = (
    Internals(
        "_C.DispatchKey.Python _C._TorchDispatchModeKey.FAKE _C._TorchDispatchModeKey.FUNCTIONAL "
        "_C._TorchDispatchModeKey.PROXY _C._dispatch_get_all_op_names _C._dispatch_has_kernel_for_dispatch_key "
        "_C._dispatch_key_parse _C._dispatch_keyset_full_after _C._dispatch_tls_is_dispatch_key_excluded "
        "_C._dispatch_tls_set_dispatch_key_included ._op "
        "_C._get_dispatch_mode _C._get_obj_in_tls _C._is_key_in_tls _C._jit_get_all_schemas _C._stash_obj_in_tls "
        "_ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS _ops._higher_order_ops",
        "draws on a CPU thread come from generators of the task, by a dispatch key that torch uses in its own tests",
        "test_draws_are_those_of_a_default_generator_in_that_state",
        "tasks on CPUs take turns at torch's default generator, as tasks on an accelerator do at that one's",
    ),
    Internals(
        "_C._remove_obj_from_tls",
        "a thread that has drawn leaves no object that it would have to drop at its end",
        "test_a_thread_that_drew_leaves_nothing_to_drop_at_its_end",
        "None stays in the thread's slot",
        since="after 2.9",
    ),
    Internals(
        "_C._cuda_getCurrentStream _C._cuda_setStream",
        "every copy makes streams current, which takes some 8 µs by torch.cuda.stream",
        "test_the_current_stream_and_device_come_back",
        "torch.cuda.current_stream and set_stream",
    ),
    Internals(
        "autograd.Variable._execution_engine.run_backward",
        "a backward of plain tensors costs 10 µs less without the checks of torch.autograd.backward",
        "test_gradients_are_those_of_torch",
    ),
    Internals(
        "autograd.Variable._execution_engine.queue_callback _C._current_graph_task_id "
        "_C._autograd._get_current_graph_task_keep_graph",
        "the backward of pipe(x) must know which pass of the engine calls it, if that keeps the graph, and its end",
        "test_a_retained_graph_that_was_stopped_goes_backward_again",
    ),
    Internals(
        "_C._len_torch_dispatch_stack _C._len_torch_function_stack _C._pop_torch_function_stack "
        "_C._push_on_torch_function_stack _C._autograd._pop_saved_tensors_default_hooks "
        "_C._autograd._push_saved_tensors_default_hooks _C._autograd._top_saved_tensors_default_hooks "
        "overrides._get_current_function_mode_stack utils._device.DeviceContext "
        "utils._python_dispatch._disable_current_modes",
        "modes and hooks for saved tensors around a task must not act on tasks of a pipeline inside it",
        "test_checkpoint_of_torch_around_the_call",
        since="2.7: 2.6 cannot tell the hooks that are set aside",
    ),
    Internals(
        "_C._functorch.is_batchedtensor _C._functorch.is_legacy_batchedtensor _C._functorch.peek_interpreter_stack "
        "autograd.forward_ad._current_level",
        "transforms of torch.func and batches of gradients are refused: other threads know nothing of them",
        "test_transforms",
    ),
    Internals(
        "autograd.graph.Node._input_metadata",
        "W gives the gradient of an edge the shape and type that the node behind it takes",
        "test_under_autocast",
    ),
    Internals(
        "Tensor._version UntypedStorage._cdata Tensor._backward_hooks Tensor._post_accumulate_grad_hooks",
        "what overwrites a tensor that others still read is refused; hooks of parameters see a step's whole gradient",
        "test_an_input_overwritten_before_the_recomputation_is_refused",
    ),
    Internals(
        "random.default_generator utils.checkpoint.CheckpointFunction",
        "functions of these modules look them up at each call, so they are replaced: where stages draw, and in traces",
        "test_nothing_of_torch_stays_replaced",
    ),
    Internals(
        "nn.Module._compiled_call_impl nn.modules.module._global_backward_hooks "
        "nn.modules.module._global_backward_pre_hooks nn.modules.module._global_forward_hooks "
        "nn.modules.module._global_forward_pre_hooks nn.modules.batchnorm._BatchNorm _C._nn._parse_to",
        "stages call forward alone where a module has no hooks; batch norms are found; to() is read as nn.Module does",
        "test_the_function_of_a_stage_calls_its_layers_and_all_hooks",
    ),
    Internals(
        "utils._python_dispatch.TorchDispatchMode",
        "what operators make in a layer's forward counts for the balance by bytes",
        "test_what_a_forward_makes_and_keeps_is_counted",
    ),
    Internals(
        ".NestedTensor._ragged_idx",
        "a gradient of a jagged tensor gets the sizes of the tensor that a recomputation has made",
        "test_jagged_tensors_between_stages",
        "none: what uses it raises",
    ),
    Internals(
        "Tensor._indices Tensor._values",
        "sparse gradients of tied parameters travel as they are, not added up before",
        "test_sparse_gradients_of_tied_embeddings",
    ),
    Internals(
        "_foreach_add_ _foreach_norm",
        "gradients of accumulated steps are added by a few kernels for all parameters of a stage, as optimizers do",
        "test_gradients_are_added_to_those_of_earlier_steps_bit_by_bit",
    ),
    Internals(
        "nn.utils.parametrize._cache_enabled",
        "the cache of parametrizations is one for all threads, and refused where it is on",
        "test_cached_parametrizations_are_refused",
    ),
    Internals(
        "utils._pytree.SUPPORTED_NODES utils._pytree.TreeSpec utils._pytree.tree_flatten utils._pytree.tree_leaves "
        "utils._pytree.tree_unflatten",
        "nested values have the containers that torch and torch.export know",
        "test_containers_are_those_of_torch",
    ),
    Internals(
        "_C._profiler._RecordFunctionFast",
        "the name of a task costs 0.3 µs while no profiler runs, and not 6 µs",
        "test_names_cost_little_in_any_torch",
    ),
    Internals(
        "_functorch.config _dynamo.exc _dynamo.config _dynamo.utils.counters _dynamo.utils.get_compilation_metrics "
        "_dynamo.maybe_mark_dynamic _TorchCompileInductorWrapper _TorchCompileWrapper "
        "_inductor.cpp_builder.get_cpp_compiler _inductor.exc.InvalidCxxCompiler utils._triton.has_triton "
        "_inductor.async_compile.AsyncCompile.pool",
        "with compile= alone: the backward is compiled with the forward, and a break or a recompilation tells its why",
        "test_a_stage_with_draws_skips_and_recomputation_is_one_graph_a_direction",
        "none: compile= raises",
    ),
    Internals(
        "UntypedStorage._share_cuda_ UntypedStorage._new_shared_cuda UntypedStorage._release_ipc_counter_cuda",
        "GPUs of two processes share memory: torch.multiprocessing does it so, but has its handles in a pickle",
        "test_a_tensor_of_a_gpu_by_each_transport",
        "edges between GPUs pass through memory of the host",
    ),
    Internals(
        ".options._timeout",
        "a group of NCCL for an edge, whose receiver may wait for as long as a peer computes",
        "test_the_watchdog_of_a_group_does_not_end_the_process",
        "none: edges by NCCL raise",
    ),
    Internals(
        ".ProcessGroupGloo._Options .ProcessGroup._register_backend .ProcessGroup._set_default_backend "
        ".ProcessGroup._allgather_base .ProcessGroup._reduce_scatter_base",
        "the group of a stage that shards itself is made anew after a failure, inside one that DTensor and FSDP2 keep",
        "test_a_failure_in_one_worker_ends_the_step_in_all",
        "none: stages that shard themselves raise",
    ),
    Internals(
        ".RNNBase._flat_weights .RNNBase._flat_weights_names .Module._non_persistent_buffers_set .GradScaler._device "
        ".OpOverload._schema .Generator._cdata",
        "recurrent layers have a second list of their weights; the other names have no public form",
        "test_a_recurrent_layer_still_uses_its_parameters",
        "none: what uses it raises",
    ),
)
