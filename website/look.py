"""Looks at every page of the built site on a telephone and on a desk: ``python -m website.look``.

Says which pages are wider than the window, load something from elsewhere, or have pictures that are not there.
``--pictures FOLDER`` keeps a picture of each, ``--only WORD …`` takes pages whose path has one of the words.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from website.browser import Tab, open_tab
from website.pages import ROOT

__all__ = ["main", "problems"]

SITE = ROOT / "build" / "site"
WIDTHS = (400, 1280)
FACTS = """({
    wide: document.documentElement.scrollWidth - innerWidth,
    broken: [...document.images].filter(each => !each.naturalWidth).map(each => each.src),
    foreign: performance.getEntriesByType('resource').map(each => each.name)
        .filter(each => !each.startsWith(location.origin) && !each.startsWith('data:')),
})"""


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """The URL at which ``folder`` is served during the block."""
    application = web.Application()
    application.router.add_static("/", folder)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def problems(tab: Tab, url: str, width: int, picture: Path | None = None, *, dark: bool = False) -> list[str]:
    """What is wrong with a page in a window of ``width`` pixels."""
    await tab.look(url, width, dark=dark)
    facts = await tab.ask(FACTS)
    if picture is not None:
        await tab.photograph(picture)
    found = [f"{facts['wide']} pixels wider than the window"] if facts["wide"] > 0 else []
    found += [f"no picture at {source}" for source in facts["broken"]]
    return found + [f"loads {source}" for source in facts["foreign"]]


async def look(pictures: Path | None, only: Sequence[str]) -> int:
    """Look at all pages; the number of those with problems."""
    wrong = 0
    pages = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    async with served(SITE) as address, open_tab() as tab:
        for page in (page for page in pages if any(word in page for word in only)):
            for width in WIDTHS:
                name = f"{page.removesuffix('.html').replace('/', '-')}-{width}.png"
                picture = None if pictures is None else pictures / name
                found = await problems(tab, f"{address}/{page}", width, picture)
                wrong += bool(found)
                for problem in found:
                    print(f"{page} at {width}: {problem}")
    print(f"{len(pages)} pages, {wrong} with problems")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a page has a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    options = parser.parse_args(argv)
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    return int(asyncio.run(look(options.pictures, options.only)) > 0)


if __name__ == "__main__":
    sys.exit(main())
