"""Which names a server is known under, and which pages are its own.

A browser lets no foreign page read an answer without CORS headers, and there are none. What is left is DNS rebinding:
a foreign page's own name, made to point to this machine. Such requests carry that name as their ``Host``. And a foreign
page can *send*, without reading what comes back: browsers name it as ``Origin`` then, and tell in ``Sec-Fetch-Site``
how near it is.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["host_name", "is_loopback", "is_own_page", "own_address", "own_host", "shown_address"]

PORTS = {"http": 80, "https": 443}


def host_name(host: str) -> str:
    """The name in a ``Host`` header, in lower case, without the port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether ``name`` can only be this machine itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def own_address(request: web.Request) -> str | None:
    """The address that the request came in on, where the server listens on several."""
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return own[0] if isinstance(own, tuple) else None


def own_host(request: web.Request, hosts: Collection[str]) -> bool:
    """Whether the request names a host that this server is known under: loopback, its address, one of ``hosts``."""
    name = host_name(request.headers.get("Host", ""))
    return name in hosts or is_loopback(name) or (name != "" and name == own_address(request))


def is_own_page(origin: str, host: str, hosts: Collection[str]) -> bool:
    """Whether a page of ``origin`` is this server's, as asked for with the header ``Host: host``.

    Another port is another program, whose pages are foreign; behind a proxy the port may be another, so that names in
    ``hosts`` are taken with any.
    """
    try:
        page, asked = urlsplit(origin), urlsplit(f"//{host}")
        if page.scheme not in PORTS or page.hostname is None:
            return False
        if page.hostname in hosts:
            return True
        default = PORTS[page.scheme]
        return (page.hostname, page.port or default) == (asked.hostname, asked.port or default)
    except ValueError:
        return False


def shown_address(address: str) -> str:
    """``address`` as a URL has it; nobody can open the address that stands for all of them."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.is_unspecified:
        return "127.0.0.1" if found.version == 4 else "[::1]"
    return address if found.version == 4 else f"[{address}]"
