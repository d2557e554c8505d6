"""Prints what a package needs, one requirement a line, so that an image layer can be built of it without the package.

``python requirements.py cli`` prints the dependencies of the ``pyproject.toml`` in the working directory and those of
its extra ``cli``. A layer that pip fills from this list stays as it is when only the package's code changes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    """Print the dependencies and those of ``extras``; ``KeyError`` for an extra that the project does not have."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(line for extra in extras for line in optional[extra])]:
        print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
