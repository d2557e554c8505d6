"""The jinja2 templates of this folder: the markup of pictures and of the page that compares steps."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

__all__ = ["rendered"]


def rendered(template: str, **values: Any) -> str:
    """The text of the file ``template`` with ``values``, of which all are escaped that are not marked as safe."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    loader = PackageLoader("asyncpipe.observe", "pictures")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["px"] = _pixels
    return environment


def _pixels(value: float) -> str:
    """``value`` to a hundredth, which halves the size of a picture."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
