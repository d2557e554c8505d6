"""Somebody on the path between two hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from thread_helpers import join_all

__all__ = ["OnThePath"]


class OnThePath:
    """Passes on what the two ends of a connection by TCP send, and may change it. The first one to come dials."""

    def __init__(self, there: tuple[str, int]) -> None:
        """``there`` is where who dials ``address`` gets to."""
        self.change: Callable[[bytes], bytes] = bytes
        """What is made of what the one sends that has dialed."""
        self.last_answer = b""
        """What the other one has sent last."""
        self._there = there
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def inject(self, data: bytes, *, back: bool = False) -> None:
        """Send something of one's own, as the end that has dialed, or ``back`` to it."""
        self._ends[0 if back else 1].sendall(data)

    def close(self) -> None:
        self._listening.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        join_all(self._threads)
        for end in self._ends:
            end.close()

    def _serve(self) -> None:
        self._ends += self._listening.accept()[0], socket.create_connection(self._there)
        back = threading.Thread(target=self._pass_on, args=(1, 0), daemon=True)
        self._threads.append(back)
        back.start()
        self._pass_on(0, 1)

    def _pass_on(self, source: int, target: int) -> None:
        with suppress(OSError):
            while data := self._ends[source].recv(1 << 20):
                if source:
                    self.last_answer = data
                self._ends[target].sendall(data if source else self.change(data))
            self._ends[target].shutdown(socket.SHUT_WR)
