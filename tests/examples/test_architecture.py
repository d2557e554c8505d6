"""``ARCHITECTURE.md`` names files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([\w/]+\.py|[\w/]+/\w*)`", TEXT)))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_of_a_file_or_folder(name):
    """From the repository or the package; or by its end, where a folder was named before."""
    assert (ROOT / name).exists() or any(ROOT.glob(f"asyncpipe/**/{name.rstrip('/')}"))


def test_the_tree_is_that_of_the_package():
    _, *lines = TEXT.split("```")[1].strip().splitlines()
    folders, upper = [ROOT / "asyncpipe"], set()
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"(\w+(/|\.py)\s*)+", line.strip())[0].split()
        assert all((folders[depth - 1] / name).exists() for name in names), line
        folders[depth:] = [folders[depth - 1] / names[0]]
        if depth == 1:
            upper.update(name.rstrip("/") for name in names)
    assert upper == {path.name for path in (ROOT / "asyncpipe").glob("[a-z]*") if path.name != "py.typed"}
