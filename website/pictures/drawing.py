"""Boxes, texts and arrows as an SVG document that can be read on light and dark pages."""

from __future__ import annotations

from html import escape

__all__ = ["GREY", "INK", "PALE", "RED", "Drawing"]

GREY = "#6e7781"
"""A text's colour with enough contrast on white and on dark pages."""
INK = "#16212c"
"""A text's colour on a coloured box."""
RED = "#cf222e"
PALE = "none"


class Drawing:
    """A picture of ``width`` by ``height`` pixels, to which shapes are added; ``title`` says what it shows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="12" fill="{GREY}" '
            'role="img">',
            f"<title>{escape(title)}</title>",
            f'<defs><marker id="head" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 6 3 0 6z" fill="{GREY}"/></marker></defs>',
        ]

    def area(self, x: float, y: float, width: float, height: float, name: str) -> None:
        """A frame with a name in its upper left corner."""
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{GREY}" fill-opacity="0.07" '
            f'stroke="{GREY}" stroke-opacity="0.5"/>'
        )
        self.text(x + 10, y + 18, name, anchor="start", bold=True)

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PALE, *, dashed: bool = False
    ) -> None:
        """A box with one or more lines of text in its middle."""
        style = f'fill="{fill}"' if fill != PALE else f'fill="{GREY}" fill-opacity="0.12"'
        border = f' stroke="{GREY}"' + (' stroke-dasharray="4 3"' if dashed else "")
        self._lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {style}{border}/>')
        lines = text.split("\n")
        for number, line in enumerate(lines):
            below = (number - (len(lines) - 1) / 2) * 15
            self.text(x + width / 2, y + height / 2 + 4 + below, line, fill=INK if fill != PALE else GREY)

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "middle", bold: bool = False, fill: str = GREY
    ) -> None:
        """One line of text, whose baseline is at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        colour = f' fill="{fill}"' if fill != GREY else ""
        self._lines.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}{colour}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False, both: bool = False) -> None:
        """A line through ``points`` with a head at its end, and at its beginning if ``both``."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self._path(path, dashed=dashed, both=both)

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = GREY) -> None:
        """A dashed line without a head."""
        self._lines.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )

    def _path(self, path: str, *, dashed: bool, both: bool = False) -> None:
        style = ' stroke-dasharray="4 3"' if dashed else ""
        start = ' marker-start="url(#tail)"' if both else ""
        if both and not any('id="tail"' in line for line in self._lines):
            self._lines.append(
                f'<defs><marker id="tail" viewBox="0 0 6 6" refX="0.5" refY="3" markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M6 0 0 3 6 6z" fill="{GREY}"/></marker></defs>'
            )
        self._lines.append(
            f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.3"{style}{start} marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The document."""
        return "\n".join([*self._lines, "</svg>"]) + "\n"
