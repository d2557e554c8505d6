"""Whose request it is: what proxies say is taken from those who are trusted, and from nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.service.http.client_address import TrustedProxies

TRUSTED = ["10.0.0.0/8", "2001:db8:ff::/48", "127.0.0.1"]


@pytest.mark.parametrize(
    ("peer", "lines", "client"),
    [
        ("192.0.2.9", ["for=192.0.2.1"], "192.0.2.9"),
        ("10.0.0.7", [], "10.0.0.7"),
        ("10.0.0.7", ["for=192.0.2.1"], "192.0.2.1"),
        ("::ffff:10.0.0.7", ["for=192.0.2.1"], "192.0.2.1"),
        ("10.0.0.7", ['For="192.0.2.1:4711";proto=https;by=10.0.0.7'], "192.0.2.1"),
        ("10.0.0.7", ['for="[2001:db8::1]:4711"'], "2001:db8::1"),
        ("2001:db8:ff::1", ['for="[::ffff:192.0.2.1]"'], "192.0.2.1"),
        ("10.0.0.7", ["for=192.0.2.1, for=10.0.0.5"], "192.0.2.1"),
        ("10.0.0.7", ["for=192.0.2.1", "for=10.0.0.5"], "192.0.2.1"),
        # What a client writes in front of that.
        ("10.0.0.7", ["for=6.6.6.6, for=192.0.2.1"], "192.0.2.1"),
        ("10.0.0.7", ["for=6.6.6.6", "for=192.0.2.1, for=10.0.0.5"], "192.0.2.1"),
        ("10.0.0.7", ['for="unclosed', "for=192.0.2.1"], "192.0.2.1"),
        ("10.0.0.7", ['for=6.6.6.6;x=", for=192.0.2.1'], "10.0.0.7"),
        ("10.0.0.7", ["for=6.6.6.6;for=192.0.2.1"], "10.0.0.7"),
        # A hop that is not known ends the list; what is in front of it was written by nobody who is trusted.
        ("10.0.0.7", ["for=6.6.6.6, for=unknown"], "10.0.0.7"),
        ("10.0.0.7", ["for=6.6.6.6, for=_hidden, for=10.0.0.5"], "10.0.0.5"),
        ("10.0.0.7", ["for=6.6.6.6, proto=https"], "10.0.0.7"),
        ("10.0.0.7", ["192.0.2.1"], "10.0.0.7"),
        (None, ["for=192.0.2.1"], None),
    ],
)
def test_forwarded(peer: str | None, lines: list[str], client: str | None) -> None:
    assert TrustedProxies(TRUSTED).client(peer, lines) == client
    assert TrustedProxies([]).client(peer, lines) == peer


@pytest.mark.parametrize(
    ("lines", "client"),
    [
        (["6.6.6.6, 192.0.2.1, 10.0.0.5"], "192.0.2.1"),
        (["6.6.6.6", "192.0.2.1:80"], "192.0.2.1"),
        (["2001:db8::1"], "2001:db8::1"),
        (["6.6.6.6, nonsense"], "10.0.0.7"),
        ([""], "10.0.0.7"),
    ],
)
def test_x_forwarded_for(lines: list[str], client: str) -> None:
    assert TrustedProxies(TRUSTED, "x-forwarded-for").client("10.0.0.7", lines) == client


@given(st.lists(st.text(alphabet='for="[]:;, 1.2\\_x', max_size=40), max_size=3))
def test_no_header_can_name_another_than_the_proxy_did(lines: list[str]) -> None:
    """Whatever a client sends: the last hop is the proxy's word, in a line of its own."""
    assert TrustedProxies(TRUSTED).client("10.0.0.7", [*lines, "for=192.0.2.1"]) == "192.0.2.1"
