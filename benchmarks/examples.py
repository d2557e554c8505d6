"""The repository's ``examples/charlm``, which some benchmarks measure."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncpipe.errors import OptionError

__all__ = ["example_folder", "example_job", "load_example"]


def example_folder(name: str) -> Path:
    """The folder of the example ``name``. Raises ``OptionError`` outside a checkout: a wheel contains no examples."""
    folder = Path(__file__).parents[1] / "examples" / name
    if not folder.is_dir():
        raise OptionError(
            f"this benchmark takes its model from examples/{name}, and there is no {folder}; run it from a checkout "
            "that is installed with 'pip install -e .'"
        )
    return folder


def example_job(name: str) -> dict[str, Any]:
    """The job file of the example ``name``, as a dict. Raises ``OptionError`` as ``example_folder`` does."""
    return tomllib.loads((example_folder(name) / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def load_example(name: str) -> ModuleType:
    """The module of the example ``name``. Raises ``OptionError`` as ``example_folder`` does."""
    spec = spec_from_file_location(f"asyncpipe_bench_{name}_example", example_folder(name) / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look up the module that defines them.
    spec.loader.exec_module(module)
    return module
