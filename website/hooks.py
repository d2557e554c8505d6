"""What mkdocs calls while it builds the site; ``mkdocs.yml`` names this file.

What is wrong is a warning, and a strict build fails by it.
"""

from __future__ import annotations

import logging

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from website import reference
from website.commands import commands_page
from website.constructor import with_constructor
from website.dialect import for_site
from website.pages import beside, outside, relinked, with_code

__all__ = ["on_config", "on_files", "on_page_markdown"]

_LOG = logging.getLogger("mkdocs.website")
BESIDE_DOCS = {"index.md", "repository/CHANGELOG.md"}
"""Pages of the navigation that no page of ``docs/`` leads to."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Check what the reference shows."""
    for name in sorted(reference.missing()):
        _LOG.warning("%s is public, and no page of docs/reference shows it", name)
    for name in reference.undocumented():
        _LOG.warning("%s has no docstring", name)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs/`` that links lead to."""
    pages = {file.src_uri for file in files.documentation_pages()} | BESIDE_DOCS
    for uri, text in outside(sorted(pages)).items():
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page for the site's parser, with links that are right there."""
    uri = page.file.src_uri
    text = with_constructor(with_code(relinked(markdown, lambda link: beside(uri, link))))
    if uri == "reference/commands.md":
        text += commands_page()
    return for_site(text)
