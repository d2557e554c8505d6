"""A headless Chromium that opens pages at a given width, measures and photographs them; it speaks its own protocol."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

__all__ = ["Tab", "open_tab"]

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync")
TALLEST = 16_000
"""Pixels of a picture: Chromium draws no more."""


class Tab:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol; events that come first are dropped."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json(timeout=120)).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def look(self, url: str, width: int, *, height: int = 900, dark: bool = False) -> None:
        """Open ``url`` in a window of ``width`` by ``height`` pixels, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)
        loaded = "new Promise(done => document.readyState == 'complete' ? done(1) : addEventListener('load', done))"
        await self.ask(f"{loaded}.then(() => document.fonts.ready).then(() => location.href)")

    async def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page; a promise's, when it is there."""
        options = {"awaitPromise": True, "returnByValue": True}
        answer = await self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    async def photograph(self, file: Path, *, whole: bool = True) -> None:
        """Write the page, or what of it is in the window, as PNG."""
        options: dict[str, Any] = {}
        if whole:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            height = min(size["height"], TALLEST)
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=whole, **options)
        file.write_bytes(base64.b64decode(picture["data"]))  # noqa: ASYNC240 - nothing else waits for this loop


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """A tab of a browser that runs during the block. Raises ``FileNotFoundError`` without Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise FileNotFoundError("pages are looked at with Chromium, and there is none; install it (apt: chromium)")
    with TemporaryDirectory() as profile:
        arguments = (*FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank")
        process = await asyncio.create_subprocess_exec(program, *arguments, stderr=asyncio.subprocess.PIPE)
        try:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{await _address(process)}/json") as answer:
                    (target,) = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
                    yield Tab(socket)
        finally:
            process.terminate()
            await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where the browser listens, which it says on standard error."""
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(rb"DevTools listening on ws://([^/]+)/", line):
            return found[1].decode()
    raise RuntimeError("the browser ended before it listened")
