"""The table of a campaign, from figures that several runs may have added up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.campaigns.architectures.judge import CELLS, EVALUATION, Cell, Header

__all__ = ["findings", "load", "save", "table"]

Line = Header | Cell
Figures = dict[str, list[Line]]
"""By architecture: its header and its cells."""


def load(path: Path) -> Figures:
    """The figures in a file; none if it is not there."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: [Header(*line) if len(line) == len(Header._fields) else Cell(*line) for line in lines]
        for name, lines in kept.items()
    }


def save(path: Path, figures: Figures) -> None:
    """Write the figures to a file."""
    path.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def findings(lines: Iterable[Line]) -> list[Cell]:
    """The cells that are neither right nor refused."""
    return [line for line in lines if isinstance(line, Cell) and line.outcome not in ("right", "refused")]


def table(figures: Figures) -> str:
    """In Markdown: a row for each architecture, what was refused by its sentence, and what was found."""
    outcomes: Counter[str] = Counter()
    rows, sentences = [], dict[str, list[str]]()
    found = []
    for name, lines in sorted(figures.items(), key=_order):
        header = next(line for line in lines if isinstance(line, Header))
        cells = {line[:2]: line for line in lines if isinstance(line, Cell)}
        outcomes.update(cell.outcome for cell in cells.values())
        shown = [_shown(cells.get(cell), sentences, f"{name} {' '.join(cell)}") for cell in CELLS]
        rows.append(
            f"| {name} | {header.library} | {header.parameters:,} | {header.how} | {header.seconds:.1f} | "
            f"{header.against} | {' | '.join(shown)} |"
        )
        found += [f"- {name}, {' '.join(cell[:2])}: {cell.outcome}: {cell.text}" for cell in findings(lines)]
    heads = ["outputs in eval mode" if cell == EVALUATION else f"{cell[0]}, {cell[1]}" for cell in CELLS]
    names = ["architecture", "from", "parameters", "cut by", "seconds to build", "against the", *heads]
    total = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    lines = [f"{len(figures)} architectures, {sum(outcomes.values())} cells: {total}.", ""]
    lines += [f"| {' | '.join(names)} |", f"|{'---|' * 2}---:|---|---:|---|{'---|' * len(heads)}", *rows]
    if sentences:
        lines += ["", "Refused:", ""]
        lines += [f"{number}. {text} ({_cells(where)})" for number, (text, where) in enumerate(sentences.items(), 1)]
    return "\n".join([*lines, *(["", "Found:", ""] if found else []), *found])


def _order(item: tuple[str, list[Line]]) -> tuple[str, str]:
    library = next(line.library for line in item[1] if isinstance(line, Header))
    return ("transformers", "torchvision", "timm", "diffusers").index(library).__str__(), item[0]


def _shown(cell: Cell | None, sentences: dict[str, list[str]], where: str) -> str:
    if cell is None:
        return "not run"
    if cell.outcome == "right":
        return cell.text
    if cell.outcome != "refused":
        return f"**{cell.outcome}**"
    sentences.setdefault(cell.text, []).append(where)
    return f"refused {1 + list(sentences).index(cell.text)}"


def _cells(where: list[str]) -> str:
    return (
        where[0] if len(where) == 1 else f"{len(where)} cells: {', '.join(dict.fromkeys(w.split()[0] for w in where))}"
    )
