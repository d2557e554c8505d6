"""Connections without a token that hold, or keep taking, every place there is: probes and clients are answered."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from tests.campaigns.service import Row
from tests.campaigns.service._flooded import TOKEN, answered, held, serve, stormed

SOCKETS = 1050
ASKED = 40


def run(folder: Path) -> list[Row]:
    """A flood that stays, one that comes again and again, and one of event streams, which nothing may displace."""
    with serve(folder) as service:
        rows = []
        with held(service.place, SOCKETS):
            for path, token in (("/livez", None), ("/readyz", None), ("/v1/jobs", TOKEN)):
                good, longest = answered(service.place, path, ASKED, token)
                what = f"{SOCKETS:,} sockets without a token are held open; {ASKED} times GET {path}"
                rows.append(
                    Row(what, f"{good} of {ASKED} answered, the slowest in {longest * 1e3:.0f} ms", good == ASKED)
                )
        with stormed(service.place) as counts:
            begun = monotonic()
            good, longest = answered(service.place, "/livez", ASKED)
            rate = sum(counts) / (monotonic() - begun)
        what = f"{rate:,.0f} new sockets a second, none of which sends anything; {ASKED} times GET /livez"
        rows.append(Row(what, f"{good} of {ASKED} answered, the slowest in {longest * 1e3:.0f} ms", good == ASKED))
    return rows
