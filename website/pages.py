"""Which files of the repository are pages of the site, and how they link to each other.

A page of ``docs/`` keeps its path. ``README.md`` is the first page. Any other file that a page links to is a page as
well, below ``repository/``: Markdown as it is, anything else as code. So a link is right on a repository host, and on
the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = [
    *(
        "ROOT",
        "anchors",
        "beside",
        "headings",
        "links",
        "outside",
        "prose",
        "relinked",
        "source_page",
        "target",
        "with_code",
    ),
]

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
FENCE = re.compile(r"^\s*(```+|~~~+)")
INCLUDED = re.compile(r"^<!-- code: (\S+) -->$", re.MULTILINE)
CODE = re.compile(r"(`+).+?\1")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "sh"}
MOST_LINES = 1500


def prose(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is text; lines of code blocks are not."""
    fence = ""
    for line in markdown.split("\n"):
        found = FENCE.match(line)
        if fence:
            yield line, False
            if found and found[1].startswith(fence):
                fence = ""
        else:
            fence = found[1] if found else ""
            yield line, not found


def links(markdown: str) -> Iterator[str]:
    """The targets of links and pictures that are paths or anchors."""
    for line, is_text in prose(markdown):
        if is_text:
            yield from (link for link in LINK.findall(CODE.sub("", line)) if not _leads_away(link))


def relinked(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with each path or anchor of a link replaced by ``change`` of it."""

    def changed(found: re.Match[str]) -> str:
        return found[1] if _leads_away(found[1]) else change(found[1])

    def line_by_line() -> Iterator[str]:
        for line, is_text in prose(markdown):
            if not is_text:
                yield line
                continue
            parts, end = [], 0
            for code in CODE.finditer(line):
                parts += [line[end : code.start()], code[0]]
                end = code.end()
            # A link's text may be code: it is cut there, and the target stands at the start of the next part.
            text = "\0".join([*parts[::2], line[end:]])
            pieces = LINK.sub(changed, text).split("\0")
            yield "".join(piece + code for piece, code in zip(pieces, [*parts[1::2], ""], strict=True))

    return "\n".join(line_by_line())


def _leads_away(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is not None


def target(path: str, link: str) -> tuple[str, str]:
    """The file of the repository that ``link`` of the file at ``path`` names, and the anchor there."""
    name, _, anchor = link.partition("#")
    return (posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path), anchor


def on_site(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + ("/README.md" if (ROOT / path).is_dir() else "")
    if (ROOT / path).is_dir():
        return f"repository/{path}/README.md"
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def in_repository(uri: str) -> str:
    """The file of the repository that the page at ``uri`` of the site shows."""
    if uri == "index.md":
        return "README.md"
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def beside(uri: str, link: str) -> str:
    """What ``link`` of the file that ``uri`` shows is on the site, relative to ``uri``."""
    path, anchor = target(in_repository(uri), link)
    there = posixpath.relpath(on_site(path), posixpath.dirname(uri) or ".")
    return (there if not link.startswith("#") else "") + (f"#{anchor}" if anchor else "")


def outside(uris: Iterable[str]) -> dict[str, str]:
    """The pages that those at ``uris`` lead to outside ``docs/``, also by each other: where, and their Markdown."""
    waiting, found = [*uris], dict[str, str]()
    while waiting:
        uri = waiting.pop()
        path = in_repository(uri)
        text = (ROOT / path).read_text(encoding="utf-8") if path.startswith("docs/") else source_page(path)
        if not path.startswith("docs/"):
            found[uri] = text
        reached = {target(path, link)[0] for link in links(text)} if path.endswith(".md") else set[str]()
        wanted = {on_site(each) for each in reached if not each.startswith("docs/") and (ROOT / each).exists()}
        waiting += wanted - found.keys() - set(waiting)
    return found


def source_page(path: str) -> str:
    """A file outside ``docs/`` as Markdown; an example's folder is its README with its files."""
    file = ROOT / path
    if path.endswith(".md"):
        text = file.read_text(encoding="utf-8")
        is_example = path.startswith("examples/") and file.name == "README.md"
        return text + "".join(_as_code(each, "## ") for each in _files(file.parent)) if is_example else text
    return _as_code(file, "# ")


def _files(folder: Path) -> list[Path]:
    every = (path for path in sorted(folder.rglob("*")) if path.suffix in LANGUAGES)
    return [path for path in every if not {"__pycache__", "runs"} & set(path.parts)]


def with_code(markdown: str) -> str:
    """``markdown`` with the file in place of each line ``<!-- code: PATH -->``, which hosts hide.

    Raises ``FileNotFoundError`` where there is no such file.
    """
    return INCLUDED.sub(lambda found: _fenced(ROOT / found[1]), markdown)


def _as_code(file: Path, heading: str) -> str:
    return f"\n{heading}{file.relative_to(ROOT).as_posix()}\n\n{_fenced(file)}\n"


def _fenced(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()[:MOST_LINES]
    return "\n".join([f"````{LANGUAGES.get(file.suffix, 'text')}", *lines, "````"])


def headings(markdown: str) -> list[str]:
    """The texts of the headings, without marks of emphasis, code and links."""
    texts = (line.lstrip("#").strip() for line, is_text in prose(markdown) if is_text and re.match(r"#{1,6} ", line))
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "") for text in texts]


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, by the rule that repository hosts and the site have in common."""
    slugs: dict[str, int] = {}
    found = set()
    for text in headings(markdown):
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = slugs[slug] = slugs.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found
