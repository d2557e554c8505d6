"""How much one client may ask for: a bucket of tokens for each address, and a number of places for all.

The table of buckets is bounded, since addresses are a client's choice where it has many (an IPv6 network counts as
one). What drops out has been quiet longest and would be full again soon.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address
from time import monotonic

__all__ = ["TokenBuckets", "LimitReachedError", "ConcurrencyLimit", "client_of", "retry_after"]

MOST_CLIENTS = 4096
IPV6_NETWORK = 64
"""Bits of an address that its owner does not choose."""


class TokenBuckets:
    """Who may ask now: ``rate`` requests a second for each client in the long run, ``burst`` at once."""

    def __init__(
        self, rate: float, burst: int, *, most: int = MOST_CLIENTS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What was left, and when that was, by client; who asked last is last."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, client: str) -> float:
        """0 if ``client`` may ask now; otherwise nothing is taken, and it is the seconds until it may."""
        now = self._clock()
        left, at = self._levels.pop(client, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._rate)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate
        self._levels[client] = (left if wait else left - 1, now)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return wait


class LimitReachedError(Exception):
    """There is no place left."""


class ConcurrencyLimit:
    """A number of places; each is held for the length of a block."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Holds a place during the block. Raises ``LimitReachedError``."""
        if self.held >= self.most:
            raise LimitReachedError
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


def client_of(remote: str | None) -> str:
    """What stands for the client at the address ``remote``."""
    try:
        address = ip_address((remote or "").partition("%")[0])
    except ValueError:
        return remote or "unknown"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Address(int(address) >> (128 - IPV6_NETWORK) << (128 - IPV6_NETWORK)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def retry_after(seconds: float) -> str:
    """``seconds`` as the header ``Retry-After`` has it: whole, and at least 1."""
    return str(max(1, math.ceil(seconds)))
