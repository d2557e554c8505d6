"""The runbook as panels, so that an operator can read it in Grafana."""

from __future__ import annotations

import re
from pathlib import Path

from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.board import Band
from dashboards.panels import runbook_url, text

__all__ = ["RUNBOOK", "bands", "entries"]

RUNBOOK = Path(__file__).with_name("RUNBOOK.md")
LETTERS = 90
"""The letters on a line of a panel of half the width."""
LINES_PER_ROW = 1.6
"""A row of the grid is 30 pixels and a gap of 8; a line of text is about 22."""


def entries(markdown: str) -> dict[str, str]:
    """The text below each heading ``## …``, by the heading, in the runbook's order."""
    parts = re.split(r"^## +(.+?) *$", markdown, flags=re.MULTILINE)
    return {heading: body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def bands(markdown: str) -> list[Band]:
    """A panel for each entry, two side by side (the last alone where their number is odd)."""
    found = entries(markdown)
    anchors = {heading.lower().replace(" ", "-"): heading for heading in found}
    shown = [(text(heading, _linked(body, anchors)), _height(body)) for heading, body in found.items()]
    return [_band(shown[at : at + 2]) for at in range(0, len(shown), 2)]


def _band(shown: list[tuple[Panel, int]]) -> Band:
    return Band(max(height for _, height in shown), tuple((panel, 24 // len(shown)) for panel, _ in shown))


def _height(body: str) -> int:
    paragraphs = re.sub(r"\n(?=[^\n-])", " ", body).splitlines()
    count = sum(-(-len(paragraph) // LETTERS) or 1 for paragraph in paragraphs)
    return max(5, 2 + round(count / LINES_PER_ROW))


def _linked(body: str, anchors: dict[str, str]) -> str:
    """``body`` with links to the panels of other entries instead of to their headings."""

    def target(found: re.Match[str]) -> str:
        heading = anchors.get(found[1])
        return f"]({runbook_url(heading)})" if heading else found[0]

    return re.sub(r"\]\(#([\w-]+)\)", target, body)
