"""The documentation without building it: every name is shown, every page is found, every link leads somewhere."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
from markdown import markdown
from markdown_it import MarkdownIt

from asyncpipe import Pipeline
from website import reference
from website.commands import commands_page, help_text
from website.constructor import HERE, options, signature, with_constructor
from website.dialect import for_site
from website.docstrings import as_markdown
from website.pages import (
    ROOT,
    anchors,
    beside,
    headings,
    links,
    outside,
    relinked,
    source_page,
    target,
    with_code,
)

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def wrong_links(path: str, markdown: str) -> list[str]:
    """The links of the file at ``path`` that lead nowhere."""
    wrong = []
    for link in links(markdown):
        there, anchor = target(path, link)
        file = ROOT / there
        if there == "docs/reference/commands.md" and anchor:
            known = anchors(text(there) + commands_page())
        elif anchor and file.suffix == ".md":
            known = anchors(markdown if there == path else text(there))
        else:
            known = {anchor}
        if not file.exists() or (anchor and anchor not in known):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("path", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", *(f"docs/{page}" for page in PAGES)])
def test_links_lead_somewhere(path):
    assert wrong_links(path, text(path)) == []


def test_links_of_other_pages_lead_somewhere():
    others = {uri.removeprefix("repository/") for uri in outside(PAGES) if uri.endswith("README.md")}
    assert {"dashboards/README.md", "docker/README.md"} <= others
    assert {path: wrong for path in others if (wrong := wrong_links(path, text(path)))} == {}


def test_a_wrong_link_is_seen():
    page = "[a](jobs.md) [b](nowhere.md) [c](jobs.md#nowhere) `[d](nowhere.md)` [e](#h)\n\n# H\n```\n[f](no.md)\n```"
    assert wrong_links("docs/start.md", page) == ["nowhere.md", "jobs.md#nowhere"]


def test_links_are_right_on_the_site_too():
    assert beside("index.md", "docs/start.md#train") == "start.md#train"
    assert beside("concepts/step.md", "../../ARCHITECTURE.md#words") == "../repository/ARCHITECTURE.md#words"
    assert beside("repository/ARCHITECTURE.md", "docs/results") == "../results/README.md"
    assert beside("service.md", "../examples/charlm") == "repository/examples/charlm/README.md"
    assert relinked("[`a`](b) `[c](d)` [e](https://f)", str.upper) == "[`a`](B) `[c](d)` [e](https://f)"


def test_an_example_is_shown_with_its_files():
    page = source_page("examples/charlm/README.md")
    assert "## examples/charlm/charlm.toml" in page
    assert "def build(" in page


def test_a_page_has_the_code_of_a_file_where_it_names_it():
    path = "examples/deadline_policy/deadline_policy.py"
    shown = with_code(f"Before.\n\n<!-- code: {path} -->\n\nAfter.\n")
    assert shown == f"Before.\n\n````python\n{text(path)}````\n\nAfter.\n"
    with pytest.raises(FileNotFoundError):
        with_code("<!-- code: examples/nothing.py -->")


def test_the_reference_shows_every_public_name(tmp_path: Path):
    assert reference.missing() == set(), "give each a line `::: asyncpipe.Name` in a page of docs/reference"
    (tmp_path / "some.md").write_text("::: asyncpipe.Pipeline\n", encoding="utf-8")
    assert {"asyncpipe.trace", "asyncpipe.errors.TaskError"} <= reference.missing(tmp_path)
    assert "asyncpipe.Pipeline" not in reference.missing(tmp_path)


def test_every_shown_name_has_a_docstring():
    assert [*reference.undocumented()] == []


def test_docstrings_become_markdown():
    docstring = "Like ``Pipeline.step``, and ``Share``:\n\n::\n\n    a block\n\nAs follows::\n\n    b\n"
    shown = as_markdown(docstring, "trace")
    assert "[`Share`][asyncpipe.Share]" in shown
    assert "::" not in shown
    assert as_markdown("``Share``", "Share") == "``Share``"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_the_same_on_a_repository_host_and_on_the_site(page):
    source = re.sub(r"^::: .*$|<!--.*?-->", "", text(f"docs/{page}"), flags=re.MULTILINE | re.DOTALL)
    host = MarkdownIt("commonmark").enable("table").render(source)
    site = markdown(for_site(source), extensions=["tables", "pymdownx.superfences", "pymdownx.highlight"])
    tags = r"<(h\d|li|table|td|pre|ol|ul|img)\b"
    assert Counter(re.findall(tags, site)) == Counter(re.findall(tags, host))


def test_the_reference_opens_with_the_constructor_and_a_row_for_each_option():
    parameters = inspect.signature(Pipeline).parameters
    assert {option.name for option in options()} == set(parameters)
    for option in options():
        assert bool(option.default) == (parameters[option.name].default is not inspect.Parameter.empty), option.name
        assert option.sentence.endswith("."), option.sentence
    assert "".join(signature().split()).startswith("asyncpipe.Pipeline(model,devices,*,microbatches,replicas=1,")
    page = text("docs/reference/pipeline.md")
    assert page.index(HERE) < page.index("::: ")
    shown = markdown(with_constructor(page), extensions=["tables"])
    assert len(re.findall("<tr>", shown)) == 1 + len(parameters)
    assert '<td><code>str | Schedule</code></td>\n<td><code>"1f1b"</code></td>' in shown


def test_what_readers_look_for_is_a_title():
    """The search ranks titles before texts; test_built_site.py asks the search itself."""
    assert headings(text("docs/memory.md"))[0] == "Out of memory"
    assert "resume" in headings(text("docs/saving.md"))[0]


def test_commands_are_shown_with_their_texts():
    page = commands_page()
    assert "\n### asyncpipe schedule show\n" in page
    assert help_text("train") in page
    assert "--max-running" in page  # Its options are made when it runs.
