"""Which requests an HTTP server of asyncpipe answers: those that name it as their host, and those of its own pages.

Answers have no CORS headers, so a browser lets no foreign page read them. Two dangers remain:

- *DNS rebinding*: a foreign page makes its own name resolve to this machine. Its requests have that name as ``Host``.
- *Cross-site requests*: a foreign page may send without reading the answer. Browsers then name the page as ``Origin``.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

__all__ = ["host_name", "is_loopback", "is_own_page", "own_host", "shown_address"]

PORTS = {"http": 80, "https": 443}


def host_name(host: str) -> str:
    """The name in a ``Host`` header, in lower case, without the port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether ``name``, a host name or an address, can only be this machine itself."""
    name = name.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def own_host(request: HTTPConnection, hosts: Collection[str]) -> bool:
    """Whether the request's host is this server: a loopback name, the server's address, or one of ``hosts``."""
    name = host_name(request.headers.get("Host", ""))
    own = request.scope.get("server")  # The address that the request was sent to, and the port.
    return name in hosts or is_loopback(name) or (name != "" and own is not None and name == own[0])


def is_own_page(origin: str, host: str, hosts: Collection[str]) -> bool:
    """Whether a page of ``origin`` is this server's, given the header ``Host: host`` of the page's request.

    The ports must be equal, since another port is another program. Names in ``hosts`` are accepted with any port,
    because a proxy in front of this server has a port of its own.
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
    """``address`` as a URL has it; the loopback address in place of the one that means "all addresses"."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.is_unspecified:
        return "127.0.0.1" if found.version == 4 else "[::1]"
    return address if found.version == 4 else f"[{address}]"
