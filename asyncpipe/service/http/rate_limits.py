"""How much clients may request: a bucket for each address and each token, and a limit on streams of all clients.

The table of buckets is bounded, since a client may have many addresses; an IPv6 /64 network counts as one. The bucket
that leaves the table is that of the client that was silent longest, and would soon be full anyway.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address
from time import monotonic

from asyncpipe.service.http.problems import Problem

__all__ = ["RateLimits", "StreamLimit", "TokenBuckets", "client_of", "retry_after"]

MOST_CLIENTS = 4096
IPV6_NETWORK = 64
"""Bits of the network prefix; the owner of a network chooses the other bits."""


class TokenBuckets:
    """A token bucket for each client: ``rate`` requests a second on average, ``burst`` at once."""

    def __init__(
        self, rate: float, burst: int, *, most: int = MOST_CLIENTS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(tokens, time of the last request) by client, in the order of their last requests."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, client: str) -> float:
        """Take a token and return 0; or return how many seconds ``client`` has to wait, and take nothing."""
        now = self._clock()
        left, at = self._levels.pop(client, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._rate)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate
        self._levels[client] = (left if wait else left - 1, now)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return wait

    def give_back(self, client: str) -> None:
        """Undo a ``take``."""
        left, at = self._levels.get(client, (float(self._burst), 0.0))
        if client in self._levels:
            self._levels[client] = (min(self._burst, left + 1), at)


class RateLimits:
    """How often may be asked: by address before it is known who asks, and by token afterwards.

    What is asked with a right token does not count for the address: many users behind one proxy do not wait for each
    other, and one who guesses tokens does not get far. Whoever has used up an address waits there also with a right
    token, since that is only known by looking at it.
    """

    def __init__(self, addresses: TokenBuckets, tokens: TokenBuckets) -> None:
        self._addresses = addresses
        self._tokens = tokens

    def of_address(self, address: str | None) -> float:
        """Count a request of ``address``; the seconds that it has to wait, 0 if none."""
        return self._addresses.take(client_of(address))

    def of_token(self, name: str) -> float:
        """Count a request with the token ``name``; the seconds that it has to wait, 0 if none."""
        return self._tokens.take(name)

    def give_back(self, address: str | None) -> None:
        """The request of ``address`` has a right token."""
        self._addresses.give_back(client_of(address))


class StreamLimit:
    """At most ``most`` answers of a kind at once, of all clients: event streams, for one."""

    def __init__(self, most: int, what: str = "event streams") -> None:
        self.most = most
        self._what = what
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Counts as one stream during the block. Raises ``Problem`` if all are in use."""
        if self.held >= self.most:
            headers = [("Retry-After", "10")]
            raise Problem(503, "too-many-streams", f"all {self._what} are in use", headers=headers)
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


def client_of(remote: str | None) -> str:
    """The bucket key of the client at the address ``remote``."""
    try:
        address = ip_address((remote or "").partition("%")[0])
    except ValueError:
        return remote or "unknown"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Address(int(address) >> (128 - IPV6_NETWORK) << (128 - IPV6_NETWORK)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def retry_after(seconds: float) -> str:
    """``seconds`` as a ``Retry-After`` header: a whole number, at least 1."""
    return str(max(1, math.ceil(seconds)))
