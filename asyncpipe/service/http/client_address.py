"""Whose request it is that arrives through proxies: the client's address, as far as trusted proxies know it.

::

    client 192.0.2.1 ──▶ proxy 10.0.0.5 ──▶ proxy 10.0.0.7 ──▶ service
                            Forwarded: for=192.0.2.1, for=10.0.0.5

Each proxy appends who it was asked by. A client can write whatever it likes in front of that, so the list is read from
its end, and only as long as the one who wrote is trusted: the connection's other end first, then each proxy that a
trusted one names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

__all__ = ["ProxyHeader", "TrustedProxies"]

ProxyHeader = Literal["forwarded", "x-forwarded-for"]

MOST_PROXIES = 32
"""The most elements that are read; no chain of trusted proxies is so long."""
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - the grammar's word
_PAIR = re.compile(rf'\s*({_TOKEN})=({_TOKEN}|"(?:[^"\\]|\\.)*")\s*')
_NODE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))(?::[0-9_A-Za-z.-]+)?")


class TrustedProxies:
    """Tells clients' addresses; ``networks`` are those of the proxies, whose word in ``header`` is taken."""

    def __init__(self, networks: Sequence[str], header: ProxyHeader = "forwarded") -> None:
        self._networks = [ip_network(network) for network in networks]
        self.header = header

    def client(self, peer: str | None, values: Sequence[str]) -> str | None:
        """The address of the client whose request came from ``peer`` with these ``values`` of the proxies' header.

        The last address that a trusted proxy has named. What is unreadable or hidden (``for=_a``, ``for=unknown``)
        ends the list: the client is then the proxy that wrote it.
        """
        if not self._networks or not self._trusts(peer):
            return peer
        client = peer
        named = _forwarded(values) if self.header == "forwarded" else _forwarded_for(values)
        for node, _ in zip(named, range(MOST_PROXIES), strict=False):
            address = _address(node)
            if address is None:
                break
            client = str(address)
            if not self._trusts(client):
                break
        return client

    def _trusts(self, name: str | None) -> bool:
        address = _address(name or "")
        return address is not None and any(address in network for network in self._networks)


def _address(node: str) -> IPv4Address | IPv6Address | None:
    """The address of ``192.0.2.1``, ``192.0.2.1:80``, ``2001:db8::1`` or ``[2001:db8::1]:80``; that of IPv4 in IPv6."""
    try:
        address = ip_address(node.partition("%")[0])
    except ValueError:
        found = _NODE.fullmatch(node)
        try:
            address = ip_address((found[1] or found[2]) if found else "")
        except ValueError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _forwarded(values: Sequence[str]) -> Iterator[str]:
    """The nodes after ``for=`` in RFC 7239's ``Forwarded``, the last first; empty for an element without one."""
    # Line by line: a client's line that cannot be read must not hide the proxy's behind it.
    for value in reversed(values):
        elements = _elements(value)
        yield from [""] if elements is None else [element.get("for", "") for element in reversed(elements)]


def _elements(text: str) -> list[dict[str, str]] | None:
    """The pairs of each element, by their names in lower case; ``None`` if ``text`` is not of the header's form."""
    elements: list[dict[str, str]] = [{}]
    at = 0
    while at < len(text):
        found = _PAIR.match(text, at)
        if found is None:
            return None
        name, value = found[1].lower(), found[2]
        if name in elements[-1]:
            return None
        elements[-1][name] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
        at = found.end()
        if at < len(text):
            if text[at] not in ",;":
                return None
            if text[at] == ",":
                elements.append({})
            at += 1
    return elements


def _forwarded_for(values: Sequence[str]) -> Iterator[str]:
    """The addresses of ``X-Forwarded-For``, the last first."""
    return (each.strip() for each in reversed(",".join(values).split(",")))
