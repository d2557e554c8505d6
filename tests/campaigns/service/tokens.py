"""Tokens made and revoked by the command, beside a service that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

from asyncpipe.service.client import ApiError, JobClient
from tests.campaigns.service import Row
from tests.campaigns.service._flooded import JOB, ask, serve


def run(folder: Path) -> list[Row]:
    """A token of each role; then that which submitted a job is revoked while it follows the job."""
    with serve(folder) as service:
        roles = ("read", "submit", "operate")
        secrets = {role: _tokens(folder, "create", f"the-{role}", "--role", role) for role in roles}
        did = {role: _do(JobClient(service.url, secret, retries=0)) for role, secret in secrets.items()}
        wanted = {"read": "200 403 403", "submit": "200 201 403", "operate": "200 201 404"}
        figure = "; ".join(f"{role}: {done}" for role, done in did.items())
        rows = [Row("list, submit and drain a host with a token of each role", figure, did == wanted)]

        client = JobClient(service.url, secrets["submit"], retries=0)
        job = client.submit(JOB | {"training": JOB["training"] | {"steps": 10**6}})
        first, ended = threading.Event(), threading.Event()

        def follow() -> None:
            try:
                for _ in client.events(job["id"]):
                    first.set()
            except Exception:  # noqa: BLE001 - the stream was cut off
                pass
            ended.set()

        threading.Thread(target=follow, daemon=True).start()
        assert first.wait(60)
        _tokens(folder, "revoke", "the-submit")
        begun = monotonic()
        status, _ = ask(service.place, "/v1/jobs", secrets["submit"])
        is_ended = ended.wait(10)
        seconds = monotonic() - begun
        service.client.cancel(job["id"])
        figure = f"the next request: {status}; the stream it had open ended after {seconds:.2f} s"
        rows.append(
            Row("a token is revoked while it follows a job", figure, status == 401 and is_ended and seconds < 2)
        )
    lines = [json.loads(line) for line in (folder / "service" / "audit.jsonl").read_text().splitlines()]
    who = [(line["token"], line["what"]) for line in lines]
    expected = [("the-submit", "submit"), ("the-operate", "submit"), ("the-submit", "submit"), ("service", "cancel")]
    rows.append(Row("what the audit says of that", ", ".join(f"{name}: {what}" for name, what in who), who == expected))
    kept = b"".join(file.read_bytes() for file in (folder / "service").glob("*") if file.is_file())
    hidden = not any(secret[-20:].encode() in kept for secret in secrets.values())
    return [*rows, Row("tokens in the files of the service", "none" if hidden else "found", hidden)]


def _tokens(folder: Path, *arguments: str) -> str:
    """What ``asyncpipe service tokens`` prints."""
    command = [sys.executable, "-m", "asyncpipe", "service", "tokens", *arguments, "--folder", "service"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _do(client: JobClient) -> str:
    """The statuses of reading, submitting and operating."""
    done = []
    for good, act in ((200, client.list), (201, lambda: client.submit(JOB)), (200, lambda: client.drain("nowhere"))):
        try:
            found = act()
            if good == 200:
                list(found)
            done.append(good)
        except ApiError as error:
            done.append(error.status)
    return " ".join(map(str, done))
