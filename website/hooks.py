"""What mkdocs calls while it builds the site; ``mkdocs.yml`` names this file.

What is wrong is a warning, and a strict build fails by it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from website import reference
from website.commands import commands_page
from website.dialect import for_site
from website.pages import beside, expanded, named, outside, relinked, unlisted, unnamed

__all__ = ["on_config", "on_files", "on_page_markdown"]

_LOG = logging.getLogger("mkdocs.website")
HELD = re.compile(r"((?:\s*`tests/\S+\.py::\w+`)+)\s*$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the entries of the navigation that have a ``*``, and check what the reference shows."""
    folder = Path(config.docs_dir)
    pages = [path.relative_to(folder).as_posix() for path in folder.rglob("*.md")]
    config.nav = expanded(config.nav or [], pages)
    for page in unnamed(config.nav, pages):
        _LOG.warning("%s is not in the navigation; name it in mkdocs.yml", page)
    for name in sorted(reference.missing()):
        _LOG.warning("%s is public, and no page of docs/reference shows it", name)
    for name in reference.undocumented():
        _LOG.warning("%s has no docstring", name)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs/`` that links lead to."""
    pages = {file.src_uri for file in files.documentation_pages()} | set(named(config.nav or []))
    for uri, text in outside(sorted(pages)).items():
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page for the site's parser, with links that are right there."""
    uri = page.file.src_uri
    text = relinked(markdown, lambda link: beside(uri, link))
    if uri == "guarantees.md":
        text = _tests_folded(text)
    if uri == "results/README.md":
        pages = {Path(file.src_uri).name: file.content_string for file in files if file.src_uri.startswith("results/2")}
        text += unlisted(markdown, {name: page for name, page in pages.items() if name.endswith(".md")})
    if uri == "reference/commands.md":
        text += commands_page()
    return for_site(text)


def _tests_folded(text: str) -> str:
    """The names of tests behind a promise in small type, since few readers look for them."""

    def folded(found: re.Match[str]) -> str:
        return '\n  <span class="held">' + " ".join(re.findall(r"`[^`]+`", found[1])) + "</span>"

    return HELD.sub(folded, text)
