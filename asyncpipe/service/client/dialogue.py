"""What a call says to whoever carries it out: open a response, read more of it, pause, here is a result. Pure.

A call is a generator, a *dialogue*: it yields one action after the other and is sent each one's answer. So what is
asked, when it is repeated and what is an error is decided once, and a client is what carries actions out::

    a call (calls.py, asking.py)            a client (blocking.py, asynchronous.py)
      yields HttpRequest      ─────────▶    sends it, and answers with the ResponseHead
             MoreBytes        ─────────▶    answers with the next bytes, none at the end
             HangUp           ─────────▶    closes the response
             Pause            ─────────▶    closes the response and sleeps
             Found            ─────────▶    gives it to the caller, and goes on when the caller wants more
      is thrown BrokenExchange ◀────────    where the connection failed
      returns the result

A request closes the response before it; the end of the dialogue closes the last one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

__all__ = [
    "Action",
    "BrokenExchange",
    "Dialogue",
    "DialogueRun",
    "Found",
    "HangUp",
    "HttpRequest",
    "MoreBytes",
    "Pause",
    "ResponseHead",
    "hang_up",
    "more_bytes",
    "open_response",
]

_T = TypeVar("_T")


class HttpRequest(NamedTuple):
    """Send this and read the response's head."""

    method: str
    path: str
    """With the query, as it goes onto the wire."""
    headers: Mapping[str, str]
    content: bytes | None
    patience: float
    """Seconds that each wait for bytes of the response may take."""


class MoreBytes(NamedTuple):
    """Read what comes next of the response's body."""


class HangUp(NamedTuple):
    """The response is no longer needed."""


class Pause(NamedTuple):
    """Do nothing for so long."""

    seconds: float


class Found(NamedTuple):
    """One of several results, for the caller."""

    value: Any


Action: TypeAlias = "HttpRequest | MoreBytes | HangUp | Pause | Found"
Dialogue: TypeAlias = Generator[Action, Any, _T]


class ResponseHead(NamedTuple):
    """The beginning of a response."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Names are in lower case."""

    def number(self, header: str) -> int | None:
        """The value of ``header`` if it is a natural number, else ``None``."""
        text = self.headers.get(header, "")
        return int(text) if text.isascii() and text.isdigit() else None


class BrokenExchange(Exception):
    """The response did not arrive, or is not one of a service. ``sent`` is false if the request surely was not."""

    def __init__(self, text: str, *, sent: bool = True) -> None:
        super().__init__(text)
        self.sent = sent


class DialogueRun(Generic[_T]):
    """A dialogue under way: ``action`` is what it wants now, ``None`` at its end, when ``result`` is there."""

    def __init__(self, dialogue: Dialogue[_T]) -> None:
        self._dialogue = dialogue
        self._result: _T | None = None
        self.action: Action | None = None
        self.answer(None)

    @property
    def result(self) -> _T:
        """What the dialogue returned."""
        return cast(_T, self._result)

    def answer(self, answer: object) -> None:
        """Say what the action came to; a ``BrokenExchange`` is thrown into the dialogue. Raises what it raises."""
        try:
            broken = isinstance(answer, BrokenExchange)
            self.action = self._dialogue.throw(cast(BrokenExchange, answer)) if broken else self._dialogue.send(answer)
        except StopIteration as end:
            self.action, self._result = None, end.value


def open_response(request: HttpRequest) -> Dialogue[ResponseHead]:
    """The head of the response to ``request``. Throws ``BrokenExchange``."""
    head: ResponseHead = yield request
    return head


def more_bytes() -> Dialogue[bytes]:
    """The next bytes of the response, none at its end. Throws ``BrokenExchange``."""
    found: bytes = yield MoreBytes()
    return found


def hang_up() -> Dialogue[None]:
    """Close the response."""
    yield HangUp()
