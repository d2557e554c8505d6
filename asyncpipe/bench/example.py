"""The examples of a checkout, for benchmarks that measure them."""

from __future__ import annotations

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import asyncpipe
from asyncpipe.errors import OptionError

__all__ = ["example_folder", "load_example"]


def example_folder(name: str) -> Path:
    """Where the example ``name`` lies; raises ``OptionError`` where it does not: no installed package has examples."""
    folder = Path(asyncpipe.__file__).parents[1] / "examples" / name
    if not folder.is_dir():
        raise OptionError(
            f"this benchmark takes its model from examples/{name}, and there is no {folder}; run it from a checkout "
            "that is installed with 'pip install -e .'"
        )
    return folder


@cache
def load_example(name: str) -> ModuleType:
    """The module of the example ``name``; raises ``OptionError`` where it is not there."""
    spec = spec_from_file_location(f"asyncpipe_bench_{name}_example", example_folder(name) / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
