"""The pictures of the documentation: ``python -m website.pictures`` draws them into ``docs/``.

::

    drawing.py      boxes, texts and arrows as SVG, readable on light and dark pages
    concepts.py     drawings of the concepts
    graph.py        a task graph, from ``lower``
    timelines.py    timelines, by the package's own pictures of simulated steps
    live.py         what cannot be drawn without training: a real step's timeline, the live page
    service.py      the pages of a real service that trains the example

All but those of the last two are the same whenever they are drawn; a test compares them with the files.
"""

from __future__ import annotations

from website.pictures.concepts import backward, failure, hosts, lanes, step
from website.pictures.graph import figure_2
from website.pictures.timelines import schedules

__all__ = ["drawn"]


def drawn() -> dict[str, str]:
    """The text of each picture, by its path in ``docs/``."""
    concepts = {"step": step, "lanes": lanes, "hosts": hosts, "backward": backward, "failure": failure}
    found = {f"pictures/{name}.svg": draw() for name, draw in concepts.items()}
    found["pictures/figure-2.svg"] = figure_2()
    return found | {f"pictures/{name}.svg": picture for name, picture in schedules().items()}
