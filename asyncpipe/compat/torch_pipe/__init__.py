"""The names of torch's former ``torch.distributed.pipeline.sync``, which newer versions of torch do not have."""

from __future__ import annotations

from asyncpipe.compat.torch_pipe.pipe import LocalOutput, Pipe, WithDevice
from asyncpipe.ops.checkpoint import is_checkpointing, is_recomputing
from asyncpipe.ops.microbatch import NoChunk
from asyncpipe.ops.sequential import PipeSequential

__all__ = ["LocalOutput", "NoChunk", "Pipe", "PipeSequential", "WithDevice", "is_checkpointing", "is_recomputing"]
