"""Downloads over HTTP: whole, by ranges, refused; bounded memory, and nothing left of a client that has gone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from http_helpers import NOBODY, Api, FakeService, mounted, served
from manager_helpers import until

from asyncpipe.service.jobs.artifacts import OpenArtifact
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.train.snapshots.format import Manifest, manifest_checksum

pytestmark = [pytest.mark.usefixtures("no_leaks")]

MODEL = bytes(range(256)) * 40


def add_model(api: Api, job: str, step: int = 7, content: bytes = MODEL) -> Path:
    """A snapshot, as far as its model is concerned."""
    folder = api.service.settings.folder / "jobs" / job / "snapshots" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(content)
    about = Manifest(step=step, sha256={"model.pt": hashlib.sha256(content).hexdigest()}).model_dump(mode="json")
    (folder / "snapshot.json").write_text(json.dumps({**about, "checksum": manifest_checksum(about)}))
    return folder / "model.pt"


async def ask(api: Api, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with api.session.request(method, f"{api.base}/v1/jobs/{path}", headers=given) as answer:
        return answer.status, await answer.read(), {name.lower(): value for name, value in answer.headers.items()}


async def test_a_model_is_downloaded_as_a_whole_and_by_ranges(tmp_path):
    async with mounted(tmp_path, below="/training") as api:
        job = await api.submitted()
        add_model(api, job)
        path = f"{job}/artifacts/model.pt"
        status, content, headers = await ask(api, path)
        digest = hashlib.sha256(MODEL)
        assert (status, content) == (200, MODEL)
        expected = {
            "content-type": "application/octet-stream",
            "content-length": str(len(MODEL)),
            "etag": f'"{digest.hexdigest()}"',
            "accept-ranges": "bytes",
            "content-disposition": f'attachment; filename="{job}-model.pt"',
            "x-content-type-options": "nosniff",
        }
        assert {name: headers[name] for name in expected} == expected
        status, content, part = await ask(api, f"{path}?step=7", Range="bytes=100-199", If_Range=headers["etag"])
        assert (status, content) == (206, MODEL[100:200])
        assert (part["content-range"], part["content-length"]) == (f"bytes 100-199/{len(MODEL)}", "100")
        assert part["etag"] == headers["etag"]
        add_model(api, job, step=8, content=b"newer")
        assert (await ask(api, path, Range="bytes=100-199", If_Range=headers["etag"]))[:2] == (200, b"newer")
        assert (await ask(api, f"{path}?step=7", Range="bytes=-5"))[1] == MODEL[-5:]
        assert (await ask(api, f"{path}?step=7", Range=f"bytes={len(MODEL)}-"))[0] == 416


async def test_losses_the_log_and_the_list(tmp_path):
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        add_model(api, job)
        api.service.tell(job, "note", level=20, text=f"see {tmp_path}/jobs/x")
        api.service.rows[job] = [LossRow(1, 0.5, 1e-3, 0.25, 64)]
        listed = json.loads((await ask(api, f"{job}/artifacts"))[1])["artifacts"]
        assert [each["name"] for each in listed] == ["model.pt", "losses.jsonl", "losses.csv", "log.jsonl"]
        assert (listed[0]["size"], listed[0]["step"], listed[1]["size"]) == (len(MODEL), 7, None)
        status, content, headers = await ask(api, f"{job}/artifacts/losses.csv")
        assert (status, content) == (
            200,
            b"step,loss,learning_rate,seconds,tokens,gradient_norm\r\n1,0.5,0.001,0.25,64,nan\r\n",
        )
        assert headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'
        assert (await ask(api, f"{job}/artifacts/losses.csv", Range="bytes=40-", If_Range=headers["etag"]))[1] == (
            content[40:]
        )
        assert b"see " in (await ask(api, f"{job}/artifacts/log.jsonl"))[1]


MISSING = [
    f"{NOBODY}/artifacts", f"{NOBODY}/artifacts/log.jsonl", "JOB/artifacts/run.pt", "JOB/artifacts/model.pt?step=8",
    "JOB/artifacts/trace.json", "JOB/artifacts/..%2f..%2fjobs.sqlite3", "JOB/artifacts/%2fetc%2fpasswd",
    "JOB/artifacts/snapshots%2fstep-7%2fmodel.pt", "JOB/artifacts/losses.csv?step=7", "JOB/artifacts/model.pt%00",
]  # fmt: skip


async def test_what_is_not_there_is_a_404(tmp_path):
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        add_model(api, job)
        for path in MISSING:
            status, content, _ = await ask(api, path.replace("JOB", job))
            assert status == 404, (path, content)
            assert tmp_path.name.encode() not in content


async def test_a_step_is_a_number(tmp_path):
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        for wrong in ("step=-1", "step=1.5", "step=x"):
            assert (await ask(api, f"{job}/artifacts/model.pt?{wrong}"))[0] == 422


async def test_a_reader_that_goes_leaves_no_file_open(tmp_path, monkeypatch):
    opened, real = list[OpenArtifact](), FakeService.open_artifact

    async def open_artifact(*arguments: object) -> OpenArtifact:
        opened.append(await real(*arguments))
        return opened[0]

    monkeypatch.setattr(FakeService, "open_artifact", open_artifact)
    async with served(tmp_path) as api:
        job = await api.submitted()
        add_model(api, job, content=b"x" * 2**26)
        async with api.session.get(f"{api.base}/v1/jobs/{job}/artifacts/model.pt") as answer:
            await answer.content.readexactly(1000)
            assert not opened[0].file.closed
            answer.close()
        await until(lambda: opened[0].file.closed)
