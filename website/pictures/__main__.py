"""``python -m website.pictures``: draw all pictures; ``--live``: those that need a run as well, in some minutes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from website.pages import ROOT
from website.pictures import drawn, live, service

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--live",
        action="store_true",
        help="train the example, draw a step, and photograph its page and those of a service",
    )
    options = parser.parse_args(argv)
    for name, text in drawn().items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    if options.live:
        asyncio.run(live.photograph(ROOT / "docs"))
        asyncio.run(service.photograph(ROOT / "docs"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
