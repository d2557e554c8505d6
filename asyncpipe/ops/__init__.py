"""The torch side: what a task computes, and on which stream.

Imports ``asyncpipe.core``, ``asyncpipe.errors`` and torch; no asyncio, and no part of ``runtime`` or ``pipeline``. The
folders, of which each may import those below it:

- ``execute``: from a task of the graph to a callable; start with ``execute/binder.py``;
- ``edges``: tensors from one worker process to another, beside ``execute``; start with ``edges/connect.py``;
- ``model``: a model as stages, micro-batches, skips, ties, batch norms;
- ``autograd``: Fork and Join, checkpointing, split backward, random streams;
- ``device``: devices, streams, copies, memory.

To follow one task: ``execute/binder.py`` enters the lane's stream and waits for dependencies (``device/streams.py``),
``execute/compute.py`` runs the stage (``model/stage.py``) or its backward, and the results go to the tables of
``execute/step_tensors.py``.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

_OLDEST = (2, 9)
"""The oldest that was tested and works. 2.6 cannot tell the hooks that ``autograd/bare_thread.py`` sets aside."""
DRAWS_KEY = "TESTING_ONLY_GenericMode"
"""torch's dispatch key that ``autograd/own_draws.py`` uses."""
_PRIVATE = """
    _C.DispatchKey.Python _C._TorchDispatchModeKey.FAKE _C._TorchDispatchModeKey.FUNCTIONAL
    _C._TorchDispatchModeKey.PROXY _C._current_graph_task_id
    _C._dispatch_get_all_op_names _C._dispatch_has_kernel_for_dispatch_key _C._dispatch_key_parse
    _C._dispatch_keyset_full_after _C._dispatch_tls_set_dispatch_key_included _C._get_dispatch_mode _C._get_obj_in_tls
    _C._is_key_in_tls
    _C._jit_get_all_schemas _C._len_torch_dispatch_stack _C._len_torch_function_stack _C._pop_torch_function_stack
    _C._push_on_torch_function_stack _C._stash_obj_in_tls
    _C._autograd._get_current_graph_task_keep_graph _C._autograd._pop_saved_tensors_default_hooks
    _C._autograd._push_saved_tensors_default_hooks _C._autograd._top_saved_tensors_default_hooks
    _C._functorch.is_batchedtensor _C._functorch.is_legacy_batchedtensor _C._functorch.peek_interpreter_stack
    _C._nn._parse_to _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS _ops._higher_order_ops
    autograd.Variable._execution_engine.run_backward nn.Module._compiled_call_impl
    nn.modules.batchnorm._BatchNorm nn.modules.module._global_backward_hooks
    nn.modules.module._global_backward_pre_hooks nn.modules.module._global_forward_hooks
    nn.modules.module._global_forward_pre_hooks
    utils._python_dispatch._disable_current_modes utils._pytree.SUPPORTED_NODES
""".split()
"""What the package uses of torch that torch does not promise to keep."""


def _check(found: Any) -> None:
    """Raises ``ImportError`` for a torch that is too old, or that has lost something that the package needs."""
    version = str(found.__version__)
    works = "asyncpipe works with torch 2.9 and newer (tested: 2.9, 2.11, 2.13 and 2.15)"
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(f"{works}; torch {version} is too old")
    for name in _PRIVATE:
        try:
            attrgetter(name)(found)
        except AttributeError:
            raise ImportError(f"{works}; torch {version} has no torch.{name}, install one of those") from None
    try:
        found._C._dispatch_key_parse(DRAWS_KEY)
    except RuntimeError:
        raise ImportError(f"{works}; torch {version} has no dispatch key {DRAWS_KEY}, install one of those") from None


_check(torch)
