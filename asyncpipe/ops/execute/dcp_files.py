"""States of stages in the layout of torch's distributed checkpoint (DCP), which torch alone reads.

::

    __0_0.distcp  __1_0.distcp  …   what each process has: whole tensors, or boxes of them, each written once
    .metadata                       by name: shape, and where which box is

``model.NAME`` is an entry of the unsplit model's state, ``optim.state.NAME.KEY`` what the optimizer remembers of the
parameter NAME. Each process plans and writes by itself, the controller puts the plans together: no process group.

Imports torch.distributed.checkpoint, which takes a second, so who needs this module imports it then.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Collection, Iterator, Mapping
from io import BytesIO
from math import prod
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from asyncpipe.whole_folder import file_sum

__all__ = ["DcpPart", "read_dcp", "write_dcp_metadata", "write_dcp_part"]

_Entry = tuple[tuple[str, ...], Any, tuple[int, ...] | None, torch.Size]
"""The path of a value in the dicts of a checkpoint; the value; of a tensor, its offsets in the whole one; its shape."""


class DcpPart(NamedTuple):
    """What one process has written."""

    items: list[WriteItem]
    results: list[WriteResult]
    paths: dict[str, tuple[str, ...]]
    sums: dict[str, str]
    """The SHA-256 of each file, by name."""


def write_dcp_part(
    folder: Path, number: int, copies: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> DcpPart:
    """Write ``copies`` (``copied_stages``) to ``folder``, as process ``number``. Blocks until they are on disk.

    ``shapes``: those of all parameters.
    """
    part, values = DcpPart([], [], {}, {}), {}
    for path, value, offsets, size in _entries(copies, shapes):
        index = MetadataIndex(".".join(path), offsets)
        part.paths[index.fqn], values[index] = path, value
        if offsets is None:
            part.items.append(WriteItem(index, WriteItemType.BYTE_IO))
        else:
            chunk = ChunkStorageMetadata(torch.Size(offsets), value.shape)
            data = TensorWriteData(chunk, TensorProperties(value.dtype), size)
            part.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    if part.items:
        planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
        planner.lookup_object = values.__getitem__  # type: ignore[assignment]
        # The last of so many plans has this process's names of files.
        plan = writer.prepare_global_plan([*[SavePlan([])] * number, SavePlan(part.items)])[-1]
        part.results.extend(writer.write_data(plan, planner).wait())
        files = {each.storage_data.relative_path for each in part.results}
        part.sums.update((file, file_sum(folder / file)) for file in files)
    return part


def write_dcp_metadata(folder: Path, parts: list[DcpPart]) -> dict[str, str]:
    """Say what is where, when all ``parts`` are written; the SHA-256 of their files. Blocks."""
    _, metadata = create_default_global_save_plan([SavePlan(part.items) for part in parts])
    metadata.planner_data = {name: path for part in parts for name, path in part.paths.items()}
    FileSystemWriter(folder).finish(metadata, [part.results for part in parts])
    return {name: each for part in parts for name, each in part.sums.items()}


def _entries(copies: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> Iterator[_Entry]:
    for file, states in copies.items():
        for name, state in states.items():
            if file.startswith("model-"):
                yield _whole(("model", name), state)
                continue
            is_cut = any(isinstance(key, int) for key in state)
            for start, piece in state.items() if is_cut else [(0, state)]:
                for key, value in piece.items():
                    path = ("optim", "state", name, key)
                    if is_cut and isinstance(value, Tensor) and value.dim():
                        yield from _boxes(path, value, start, shapes[name])
                    elif start == 0:
                        yield _whole(path, value)


def _whole(path: tuple[str, ...], value: Any) -> _Entry:
    if isinstance(value, Tensor):
        return path, value, (0,) * value.dim(), value.shape
    return path, value, None, torch.Size()


def _boxes(path: tuple[str, ...], piece: Tensor, start: int, shape: torch.Size) -> Iterator[_Entry]:
    """Boxes of a tensor of ``shape`` that together are its elements from ``start``, which ``piece`` has."""
    while len(piece):
        offsets = tuple(start // prod(shape[d + 1 :]) % size for d, size in enumerate(shape))
        # The largest rows that begin here and that the piece has whole.
        rows = ((d, prod(shape[d + 1 :])) for d in range(len(shape)))
        d, row = next((d, row) for d, row in rows if start % row == 0 and len(piece) >= row)
        count = min(len(piece) // row, shape[d] - offsets[d])
        yield path, piece[: count * row].view(*[1] * d, count, *shape[d + 1 :]), offsets, shape
        piece, start = piece[count * row :], start + count * row


# Reading


def read_dcp(
    folder: Path, part: Literal["model", "optim"], names: Collection[str] | None, *, only_shapes: bool
) -> dict[str, Any]:
    """What the folder has of the model's state, or what optimizers remember, by name; of these ``names``, or of all.

    On the CPU, or tensors without memory if ``only_shapes`` are wanted. Blocks. Raises ``pickle.UnpicklingError`` for
    files that would execute something.
    """
    with (folder / ".metadata").open("rb") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
    place = 1 if part == "model" else 2
    every = {each: path for each, path in metadata.planner_data.items() if path[0] == part}
    paths = {each: path for each, path in every.items() if names is None or path[place] in names}
    state = {each: _empty(metadata.state_dict_metadata[each], "meta" if only_shapes else "cpu") for each in paths}
    if not only_shapes:
        planner = _DcpLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    found: dict[str, Any] = {}
    for each, path in paths.items():
        if part == "model":
            found[path[place]] = state[each]
        else:
            found.setdefault(path[place], {})[path[place + 1]] = state[each]
    return found


def _empty(about: object, device: str) -> Tensor | None:
    if isinstance(about, TensorStorageMetadata):
        return torch.empty(about.size, dtype=about.properties.dtype, device=device)
    return None


class _MetadataUnpickler(pickle.Unpickler):
    """Knows what torch writes into ``.metadata``, and refuses all else, which torch itself would execute."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        is_class = isinstance(found, type) and (issubclass(found, PurePath) or found.__module__ == module in _MODULES)
        if is_class or isinstance(found, torch.dtype) or found is torch.Size or (module, name) == _LAYOUT:
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


_MODULES = ("torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata")
_LAYOUT = ("torch.serialization", "_get_layout")


class _DcpLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
