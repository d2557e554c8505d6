"""What is different in other versions of torch: one that cannot work is refused by one sentence, at the import."""

from __future__ import annotations

import ast
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from preloaded import run_script
from torch_names import INTERNALS

import asyncpipe
from asyncpipe.ops import torch_internals
from asyncpipe.ops.torch_internals import NEEDED, check_torch, with_reference

PACKAGE = Path(asyncpipe.__file__).parent


@pytest.mark.promise("Versions", "torch before 2.9 is refused by one sentence at the import.")
@pytest.mark.parametrize("version", ["2.6.0+cu124", "1.13.1", "2.8.0"])
def test_too_old(version: str) -> None:
    with pytest.raises(ImportError, match=r"works with torch 2\.9 and newer .*; torch .* is too old$"):
        check_torch(SimpleNamespace(__version__=version))


@pytest.mark.promise(
    "Versions", "A version of torch that lacks an internal that asyncpipe needs is refused at the import by its name."
)
def test_a_private_name_is_gone() -> None:
    with pytest.raises(ImportError, match=r"torch 2\.99\.0 has no torch\.autograd\.\S+, install one"):
        check_torch(SimpleNamespace(__version__="2.99.0", autograd=SimpleNamespace()))


# Names


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of torch, and the private attributes of objects that only torch has, in a module."""
    listed = {name.rpartition(".")[2] for each in INTERNALS for name in each.names.split()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in full if any(word.startswith("_") for word in name.split(".")))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            name = ast.unparse(node)
            if name.startswith(("torch.", "nn.")) or (node.attr in listed and not name.startswith("self._")):
                yield name


def test_private_names_of_torch_are_in_one_module() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        # Benchmarks may look at more than what runs in production.
        if path != Path(torch_internals.__file__) and PACKAGE / "bench" not in path.parents
        for name in private_names(ast.parse(path.read_text()))
    }
    assert not found


def test_each_private_name_has_a_reason_and_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    for each in INTERNALS:
        assert each.why, each.names
        assert f"def {each.test}(" in tests, each.test


def test_the_import_looks_for_names_without_a_public_way() -> None:
    assert {name for each in INTERNALS if not each.instead for name in each.names.split()} == set(NEEDED)


# Where a name is missing

DRAWS_ALONE = """
import torch
{}
import asyncpipe
from asyncpipe.ops import torch_internals
assert torch_internals.DRAWS is {}
def losses(checkpoint):
    torch.manual_seed(1)
    layers = [layer for _ in range(2) for layer in (torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))]
    pipe = asyncpipe.Pipeline(torch.nn.Sequential(*layers), ["cpu:0", "cpu:1"], microbatches=4, balance=[2, 2],
                              checkpoint=checkpoint, loss_fn=torch.nn.functional.mse_loss)
    with pipe.sync() as pipe:
        made = [pipe.step(torch.ones(8, 4), torch.zeros(8, 4)).loss.item() for _ in range(3)]
        return made + [parameter.grad.sum().item() for parameter in pipe.parameters()]
never = losses("never")
assert losses("always") == never and len(set(never[:3])) == 3
print(never)
"""


@pytest.mark.promise(
    "Versions", "Without an internal of torch that it can do without, asyncpipe is slower, and results stay right."
)
def test_without_a_dispatch_key_tasks_on_cpus_take_turns_and_draw_the_same(tmp_path: Path) -> None:
    gone = "del torch._C._dispatch_keyset_full_after"
    command = [sys.executable, "-c", DRAWS_ALONE.format(gone, "None")]
    without = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run_script(DRAWS_ALONE.format("", "not None"), tmp_path) == (0, without.stdout, "")


@pytest.mark.promise(
    "Versions", "Without an internal of torch that it can do without, asyncpipe is slower, and results stay right."
)
@pytest.mark.parametrize("where", [0, 1])
def test_the_current_stream_and_device_come_back(monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    """As torch.cuda keeps them: a current device, and of each device a current stream."""
    device, current = [0], {index: (7, index, 1) for index in range(2)}

    def put(*, stream_id: int, device_index: int, device_type: int) -> None:
        device[0], current[device_index] = device_index, (stream_id, device_index, device_type)

    def get(index: int) -> tuple[int, int, int]:
        return current[device[0] if index < 0 else index]

    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", get, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", put, raising=False)
    torch_internals.stream_functions.cache_clear()
    stream = SimpleNamespace(device=torch.device("cuda", where), stream_id=3, device_index=where, device_type=1)
    with torch_internals.CurrentStream(stream):
        assert device == [where]
        assert current == {where: (3, where, 1), 1 - where: (7, 1 - where, 1)}
    assert device == [0]
    assert current == {index: (7, index, 1) for index in range(2)}
    torch_internals.stream_functions.cache_clear()


# References in the slot of a thread


def old_put(slot: str, value: object) -> None:
    """Takes no reference, but drops one when the slot changes, as torch itself does up to 2.11."""
    with_reference(torch._C._stash_obj_in_tls, slot)(slot, value)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


@pytest.mark.parametrize("torchs", [torch._C._stash_obj_in_tls, old_put], ids=["of this torch", "of an old one"])
def test_a_slot_holds_one_reference(torchs: Callable[[str, object], None]) -> None:
    put = with_reference(torchs, "asyncpipe: a test")
    value = object()
    alone = sys.getrefcount(value)
    kept = [value] * 20  # A missing reference fails the test instead of Python.
    for _ in range(10):
        put("asyncpipe: a test", value)
        assert sys.getrefcount(value) == alone + len(kept) + 1
        put("asyncpipe: a test", kept)
        assert sys.getrefcount(value) == alone + len(kept)
