"""The built site in a browser: code is whole, nothing is wider than the window, and the search finds what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser_helpers import CHROMIUM, NEEDS_A_BROWSER, NODE

from website import reference
from website.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WANTED = {
    "data parallel": {"parallelism.html", "replicas.html"},
    "resume": {"saving.html", "jobs.html"},
    "out of memory": {"memory.html"},
}
"""Which pages are an answer, by what a reader looks for."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, which is built for these tests."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=500)
    return folder


@pytest.fixture
def url(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_other_sites_can_link_to_every_public_name(site: Path) -> None:
    compressed = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]
    names = {line.split(" ")[0] for line in zlib.decompress(compressed).decode().splitlines()}
    assert reference.shown().keys() - names == set()


@pytest.mark.parametrize("_", [pytest.param(None, marks=NEEDS_A_BROWSER, id="chromium")])
def test_pages_are_whole_in_a_browser_and_the_search_finds_them(_: None, site: Path, url: str, tmp_path: Path) -> None:
    every = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    pages = [page for page in every if not page.startswith(("results/", "repository/tests/")) and page != "404.html"]
    assert CHROMIUM is not None
    done = subprocess.run(
        ["node", "site.mjs", url, CHROMIUM, str(tmp_path / "profile")],
        cwd=NODE,
        input=json.dumps({"pages": pages, "queries": [*WANTED]}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["facts"]
    assert facts["cut"] == {}, "by page: the columns of blocks that are cut at 1,280 px"
    assert facts["wide"] == {}, "by page: its width, where that is more than the window's"
    assert facts["split"] == [], "names of schedules in two lines"
    for query, answers in WANTED.items():
        assert answers & set(facts["found"][query]), (query, facts["found"][query])
