"""A real nginx with ``docker/nginx/asyncpipe.conf`` in front of a service, for as long as a block takes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["NGINX", "proxied"]

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")
CONF = Path(__file__).parents[2] / "docker" / "nginx" / "asyncpipe.conf"
MAIN = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections {connections}; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/asyncpipe.conf;
}}
"""


@contextmanager
def proxied(
    folder: Path, port: int, *, connections: int = 1024, replaced: Mapping[str, str] = {}, **changed: str
) -> Iterator[tuple[str, int]]:
    """The address of an nginx in front of the service on ``port``; ``changed`` are other values of its directives.

    ``replaced`` are texts of the file, and what it has in their place.
    """
    assert NGINX is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()
    lines = []
    for line in CONF.read_text(encoding="utf-8").splitlines():
        name = line.split()[0] if line.split() else ""
        lines.append(f"{name} {changed[name]};" if name in changed else line)
    text = (
        "\n".join(lines)
        .replace("127.0.0.1:8080;", f"127.0.0.1:{port};")
        .replace("listen 80;", f"listen {own[0]}:{own[1]};")
    )
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "asyncpipe.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, connections=connections), encoding="utf-8")
    process = subprocess.Popen(
        [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(own, timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "error.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield own
    finally:
        process.terminate()
        process.wait(20)
