"""Connections without a token that take every place there is: probes, and clients are answered."""

from __future__ import annotations

import socket
from pathlib import Path
from time import monotonic

from tests.campaigns.service import Row
from tests.campaigns.service._flooded import TOKEN, answered, held, serve, stormed

SOCKETS = 1050
ASKED = 40


def run(folder: Path) -> list[Row]:
    """A flood that stays, and one that comes again and again, on the API's port."""
    rows: list[Row] = []

    def asked(flood: str, place: tuple[str, int], path: str, token: str | None = None) -> None:
        good, longest = answered(place, path, ASKED, token)
        figure = f"{good} of {ASKED} answered, the slowest in {longest * 1e3:.0f} ms"
        rows.append(Row(f"{flood}; {ASKED} times GET {path}", figure, good == ASKED))

    with socket.create_server(("127.0.0.1", 0)) as free:
        probes = free.getsockname()
    with serve(folder, "--probe-port", str(probes[1])) as service:
        with held(service.place, SOCKETS):
            for path, token in (("/livez", None), ("/readyz", None), ("/v1/jobs", TOKEN)):
                asked(f"{SOCKETS:,} sockets without a token are held open", service.place, path, token)
        for place, where in ((service.place, ""), (probes, " on --probe-port")):
            with stormed(service.place) as counts:
                begun = monotonic()
                good, longest = answered(place, "/livez", ASKED)
                rate = sum(counts) / (monotonic() - begun)
            what = f"{rate:,.0f} new sockets a second, none of which sends anything; {ASKED} times GET /livez{where}"
            rows.append(Row(what, f"{good} of {ASKED} answered, the slowest in {longest * 1e3:.0f} ms", good == ASKED))
    return rows
