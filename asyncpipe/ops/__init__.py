"""The torch side: what a task computes, and on which stream.

Imports ``asyncpipe.core``, ``asyncpipe.errors`` and torch; no asyncio, and no part of ``runtime`` or ``pipeline``. The
folders, of which each may import those below it:

- ``execute``: from a task of the graph to a callable; start with ``execute/binder.py``;
- ``edges``: tensors from one worker process to another, beside ``execute``; start with ``edges/connect.py``;
- ``model``: a model as stages, micro-batches, skips, ties, batch norms;
- ``autograd``: Fork and Join, checkpointing, split backward, random streams;
- ``device``: devices, streams, copies, memory;
- ``torch_internals``: every private name of torch that is used. Its import refuses a torch that is unsuitable.

To follow one task: ``execute/binder.py`` enters the lane's stream and waits for dependencies (``device/streams.py``),
``execute/compute.py`` runs the stage (``model/stage.py``) or its backward, and the results go to the tables of
``execute/step_tensors.py``.
"""

from __future__ import annotations

from asyncpipe.ops import torch_internals as torch_internals
