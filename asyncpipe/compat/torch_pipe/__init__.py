"""The names of torch's former ``torch.distributed.pipeline.sync``, which newer versions of torch do not have."""

from __future__ import annotations

from asyncpipe.compat.torch_pipe.pipe import LocalOutput, Pipe, WithDevice
from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing
from asyncpipe.ops.model.microbatch import NoChunk
from asyncpipe.ops.model.sequential import PipeSequential

__all__ = ["LocalOutput", "NoChunk", "Pipe", "PipeSequential", "WithDevice", "is_checkpointing", "is_recomputing"]
