"""Drives a page in a headless browser by a script of ``tests/node``."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["NEEDS_A_BROWSER", "driven"]

NODE = Path(__file__).resolve().parents[1] / "node"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("ASYNCPIPE_TEST_PICTURES")
"""A folder for screenshots, to look at them."""
NEEDS_A_BROWSER = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install Debian's package chromium"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no node: install Node.js 20 or later"),
    pytest.mark.skipif(
        not all((NODE / "node_modules" / name).is_dir() for name in ("puppeteer-core", "axe-core")),
        reason="no puppeteer-core or axe-core: run make node",
    ),
]


async def driven(
    script: str, url: str, profile: Path, answers: Mapping[str, Callable[[], Awaitable[None]]]
) -> dict[str, Any]:
    """What the script saw of the page at ``url``; does what it asks for meanwhile."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        "node", script, url, CHROMIUM, str(profile), *([PICTURES] if PICTURES else []),
        cwd=NODE, limit=1 << 20, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async for line in process.stdout:
            message = json.loads(line)
            if "facts" in message:
                found: dict[str, Any] = message["facts"]
                return found
            await answers[message["ask"]]()
            process.stdin.write(b"done\n")
            await process.stdin.drain()
        raise AssertionError(f"the script ended: {(await process.stderr.read()).decode()}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
