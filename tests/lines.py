"""How large the project is, by folder: `python -m tests.lines [REVISION]`, the second form beside an older revision.

A line of code is one without docstrings, comments, blank lines and imports. Pages (JS, CSS, HTML) and tests are counted
in whole lines. What is counted is what git tracks; vendored files do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import PurePosixPath

_BLOCKS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_PAGES = {".js", ".css", ".html"}
_ENGINE = ("core", "ops", "runtime", "pipeline", "worker")


def code_lines(text: str) -> int:
    """The lines of code of one Python file."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, _BLOCKS) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            left_out.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in left_out and not line.strip().startswith("#") for number, line in lines if line.strip())


def count(revision: str | None) -> Counter[str]:
    """Folder -> lines, of the working tree or of `revision`."""
    git = ["git", "ls-files"] if revision is None else ["git", "ls-tree", "-r", "--name-only", revision]
    names = subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines()
    sums: Counter[str] = Counter()
    for path in map(PurePosixPath, names):
        top, suffix = path.parts[0], path.suffix
        page = top == "asyncpipe" and suffix in _PAGES and "vendor" not in path.parts
        if not page and (suffix != ".py" or top not in ("asyncpipe", "benchmarks", "tests", "website")):
            continue
        text = _text(path, revision)
        if page:
            sums["pages (JS, CSS, HTML), lines"] += len(text.splitlines())
        elif top == "tests":
            sums["tests, lines"] += len(text.splitlines())
            sums[f"tests/{path.parts[1]}" if len(path.parts) > 2 else "tests/*.py"] += len(text.splitlines())
        else:
            lines = code_lines(text)
            sums[top] += lines
            if top == "asyncpipe":
                sums[f"asyncpipe/{path.parts[1]}" if len(path.parts) > 2 else "asyncpipe/*.py"] += lines
                if path.parts[1] in _ENGINE:
                    sums["asyncpipe, the engine"] += lines
    return sums


def _text(path: PurePosixPath, revision: str | None) -> str:
    if revision is None:
        try:
            with open(path) as file:
                return file.read()
        except FileNotFoundError:  # removed, and not committed yet
            return ""
    return subprocess.run(["git", "show", f"{revision}:{path}"], check=True, capture_output=True, text=True).stdout


def main() -> None:
    now = count(None)
    before = count(sys.argv[1]) if len(sys.argv) > 1 else None
    for folder in sorted(now.keys() | (before or {}).keys()):
        print(f"{folder:32}{'' if before is None else f'{before[folder]:8,}'}{now[folder]:8,}")


if __name__ == "__main__":
    main()
