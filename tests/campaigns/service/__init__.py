"""Floods, faults and a full house: what a service meets in a year, each made to happen to a real one.

::

    campaign.py   runs rows by name
    NAME.py       ``run(folder)`` makes it happen to a real ``asyncpipe serve`` and returns rows

A row names what was done, the figure that was seen, and whether the service held. ``folder`` is empty, and the row's
own. Everything that a row starts has ended when it returns.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Row"]


class Row(NamedTuple):
    """One line of the table."""

    what: str
    """What was done to the service."""
    figure: str
    """What was seen, with units."""
    held: bool
    """Whether that is what the service promises."""
