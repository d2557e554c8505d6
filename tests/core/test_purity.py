"""The structure of the package: the core is pure, imports go down only, importing the package does not load torch."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import asyncpipe
from asyncpipe import core

ROOT = Path(asyncpipe.__file__).parent
CORE = sorted(info.name for info in pkgutil.walk_packages(core.__path__, "asyncpipe.core."))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
PARTS = (
    *("checks", "compile_option", "kinds", "hosts", "splitmix"),
    *("schedules", "graph", "policies", "engine", "records", "hangs", "predict"),
)
LOADED = "import sys; print(*(name for name in ('torch', 'asyncio', 'uvloop', 'numpy') if name in sys.modules))"


def loaded_by(statements: str) -> list[str]:
    """Which of the heavy modules a fresh interpreter has after ``statements``."""
    command = [sys.executable, "-c", f"{statements}\n{LOADED}"]
    return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True).stdout.split()


def test_the_core_loads_neither_torch_nor_asyncio() -> None:
    assert {module.split(".")[2] for module in CORE} == set(PARTS)
    assert loaded_by("import asyncpipe.errors, " + ", ".join(CORE)) == []


def test_a_step_can_be_simulated_without_torch() -> None:
    simulation = "import asyncpipe; dir(asyncpipe)\n"
    simulation += "from asyncpipe import Shape, find_schedule, lower, report, simulate\n"
    simulation += "assert report(simulate(lower(find_schedule('gpipe'), Shape(2, 2, 2)))).seconds == 9.0"
    assert loaded_by(simulation) == []


def test_the_runtime_needs_no_torch() -> None:
    runtime = "import asyncpipe.runtime.driver, asyncpipe.runtime.portal"
    loaded = loaded_by(f"{runtime}, asyncpipe.runtime.workers.group, asyncpipe.runtime.workers.worker_main")
    assert "asyncio" in loaded, "the tests above can fail"
    assert "torch" not in loaded


def test_every_public_name_is_there() -> None:
    for name in asyncpipe.__all__:
        assert getattr(asyncpipe, name) is not None
    with pytest.raises(AttributeError, match="module 'asyncpipe' has no attribute 'Pipe'"):
        _ = asyncpipe.Pipe


def test_imports_keep_to_the_contracts() -> None:
    """The import-linter contracts of pyproject.toml."""
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_only_entry_points_and_what_all_folders_use_are_at_the_root() -> None:
    shared = {"errors.py", "secured.py", "shared_memory.py", "whole_folder.py"}
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "testing.py"} | shared


def test_each_folder_says_what_it_holds() -> None:
    silent = [str(path.relative_to(ROOT)) for path in ROOT.rglob("__init__.py") if not ast.get_docstring(TREES[path])]
    assert silent == []


def test_a_type_name_means_one_thing() -> None:
    """A private name may not repeat a public one, either. torchgpipe's public types keep their names."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        if "torchgpipe" not in path.parts:
            for name in (node.name.lstrip("_") for node in tree.body if isinstance(node, ast.ClassDef)):
                homes[name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


FOREIGN = {"_apply", "_buffers", "_device", "_devices", "_parameters", "_threads", "_timeout", "_values", "_version"}
"""Private names of torch that classes of ours have, too."""


def private_names(tree: ast.Module) -> set[str]:
    """The private attributes, functions and classes that a module defines."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_tables_that_grow_meanwhile_are_copied_in_one_operation() -> None:
    """Without the interpreter's lock, ``tuple`` of a dict's view iterates, and ``list`` of it does not; iterating over
    a ``WeakSet`` fails, with the lock as well, when a member goes on another thread."""
    view = re.compile(r"tuple\([\w.]*\._\w+\.(values|items|keys)\(\)\)")
    assert [path.name for path in TREES if view.search(path.read_text(encoding="utf-8"))] == []


def test_no_module_reaches_into_private_names() -> None:
    """Private names of ours are used on self, cls, super() and, in its own module, on a class."""
    ours = set().union(*map(private_names, TREES.values())) - FOREIGN
    found = []
    for path, tree in TREES.items():
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in ours:
                continue
            if ast.unparse(node.value) not in {"self", "cls", "super()"} | classes:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
