"""A webhook's receiver on loopback, which checks signatures with nothing of the package."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["WebhookReceiver", "signature"]


class WebhookReceiver:
    """Keeps what it got, and answers what ``answers`` say, then 204; a context manager."""

    def __init__(self, port: int = 0) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        """Headers, with names in small letters, and body."""
        self.answers: list[str] = []
        """Status and headers, each with its end of line."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                receiver.may_answer.wait(30)
                answer = receiver.answers.pop(0) if receiver.answers else "204 No Content\r\n"
                self.wfile.write(f"HTTP/1.1 {answer}content-length: 0\r\n\r\n".encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> WebhookReceiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def messages(self) -> list[dict[str, Any]]:
        """The bodies."""
        return [json.loads(body) for _, body in self.got]


def signature(key: bytes, headers: dict[str, str], body: bytes) -> str:
    """The one that a message with this id and time must have."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
