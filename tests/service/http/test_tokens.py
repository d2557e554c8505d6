"""Who may do what over HTTP: tokens with roles, and the audit, which says who."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from http_helpers import NOBODY, TOKEN, Api, mounted, served, submission

from asyncpipe.observe.live import LiveView, event_streams
from asyncpipe.service.job_states import JobState
from asyncpipe.service.token_roles import TokenRole, create_token, revoke_token

pytestmark = [pytest.mark.usefixtures("no_leaks")]


def token(api: Api, name: str, role: str) -> dict[str, str]:
    """Headers with a new token."""
    secret, _ = create_token(api.service.settings.folder, name, TokenRole(role))
    return {"Authorization": f"Bearer {secret}"}


async def status(api: Api, method: str, path: str, body: Any = None, **headers: str) -> int:
    return (await api.ask(method, path, body, **headers))[0]


@pytest.mark.promise("Security", "Each role may do what it says, and the audit has the name of the token.")
async def test_each_role_may_what_it_says(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        assert await status(api, "GET", "/v1/jobs") == 200
        roles = {role: token(api, f"my-{role}", role) for role in ("read", "submit", "operate")}
        assert await status(api, "GET", "/v1/jobs") == 401, "from the first token on, one is needed"
        for role, asked in roles.items():
            for path in ("/v1/jobs", "/", "/v1/workers", "/v1/openapi.json"):
                assert await status(api, "GET", path, **asked) == 200
            may_submit, may_operate = role != "read", role == "operate"
            for path, body, may, done in (
                ("/v1/jobs", submission(), may_submit, 201),
                (f"/v1/jobs/{NOBODY}/cancel", {}, may_submit, 404),
                ("/v1/workers/a/drain", {}, may_operate, 200),
            ):
                found, answer, _ = await api.ask("POST", path, body, **asked)
                assert found == (done if may else 403), (role, path)
                if not may:
                    assert answer["detail"].startswith(f"my-{role} may {role}; this needs somebody who may ")
        submit = (f"/v1/jobs/{NOBODY}{path}" for path in ("/pause", "/resume", "/retry", "/fork", "/schedule", ""))
        methods = {"/schedule": "PUT", "": "PATCH"}
        for path in submit:
            method = methods.get(path.removeprefix(f"/v1/jobs/{NOBODY}"), "POST")
            assert await status(api, method, path, {}, **roles["read"]) == 403
            assert await status(api, method, path, {}, **roles["submit"]) != 403
        for role, found in (("read", 403), ("submit", 404)):
            assert await status(api, "DELETE", f"/v1/jobs/{NOBODY}", **roles[role]) == found


@pytest.mark.promise("Security", "Each role may do what it says, and the audit has the name of the token.")
async def test_the_audit_says_who_changed_what_and_who_was_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asyncpipe.audit")
    async with mounted(tmp_path, token=TOKEN) as api:
        ci, reader = token(api, "ci", "submit"), token(api, "ada", "read")
        service = {"Authorization": f"Bearer {TOKEN}"}
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **ci, Idempotency_Key="my-key")
        await api.ask("GET", "/v1/jobs", **reader)
        await api.ask("POST", f"/v1/jobs/{job['id']}/pause", {}, **service)
        await api.ask("POST", f"/v1/jobs/{job['id']}/pause", {}, **service)
        await api.ask("POST", "/v1/jobs", submission(), **reader)
        await api.ask("GET", "/" + "p" * 5000, Host="evil.example")
        await api.ask("GET", f"/v1/jobs?token={TOKEN}")
    told = [(each.name, each.token, each.what[:20], each.status, each.job) for each in caplog.records  # type: ignore[attr-defined]
            if each.name.startswith("asyncpipe.audit")]  # fmt: skip
    changes, refusals, pause = "asyncpipe.audit", "asyncpipe.audit.refused", f"POST /v1/jobs/{job['id']}"[:20]
    assert told == [
        (changes, "ci", "POST /v1/jobs", 201, job["id"]),
        (changes, "service", pause, 200, None),
        (refusals, "service", pause, 409, None),
        (refusals, "ada", "POST /v1/jobs", 403, None),
        (refusals, None, "GET /" + "p" * 15, 421, None),
        (refusals, None, "GET /v1/jobs", 401, None),
    ]
    assert TOKEN not in caplog.text
    assert "my-key" not in caplog.text
    assert max(len(line) for line in caplog.text.splitlines()) < 500


async def test_of_two_apis_in_one_process_each_has_an_audit_also_when_the_other_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asyncpipe.audit")
    jobs = []
    async with mounted(tmp_path / "a") as api:
        async with mounted(tmp_path / "b") as other:
            jobs += [await api.submitted(), await other.submitted()]
        jobs.append(await api.submitted())
    told = [each.job for each in caplog.records if each.name == "asyncpipe.audit"]  # type: ignore[attr-defined]
    assert told == jobs


@pytest.mark.promise(
    "Security", "A revoked token is refused from the next request on; the service stores only hashes of tokens."
)
async def test_a_revoked_token_ends_at_once_and_so_does_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "LOOK_SECONDS", 0.01)
    async with mounted(tmp_path) as api:
        ci, other = token(api, "ci", "submit"), token(api, "other", "read")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **ci)
        api.service.views[job["id"]] = LiveView("demo")
        async with (
            api.session.get(f"{api.base}/v1/jobs/{job['id']}/events", headers=ci) as stream,
            api.session.get(f"{api.base}/jobs/{job['id']}/events", headers=ci) as page,
            api.session.get(f"{api.base}/v1/jobs/{job['id']}/events", headers=other) as kept,
        ):
            await stream.content.readline()
            revoke_token(api.service.settings.folder, "ci")
            assert await status(api, "GET", "/v1/jobs", **ci) == 401
            await stream.content.read()  # They end.
            await page.content.read()
            assert await status(api, "GET", "/v1/jobs", **other) == 200
            api.service.tell(job["id"], "note", level=20, text="goes on")
            assert b"goes on" in await kept.content.readuntil(b"goes on")


async def test_one_token_has_a_quarter_of_the_places_for_event_streams(tmp_path: Path) -> None:
    async with mounted(tmp_path, max_connections=8) as api, AsyncExitStack() as open_streams:
        ci, other = token(api, "ci", "read"), token(api, "other", "submit")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **other)
        api.service.views[job["id"]] = LiveView("demo")
        paths = [f"/v1/jobs/{job['id']}/events", f"/jobs/{job['id']}/events"]
        streams = [
            await open_streams.enter_async_context(api.session.get(f"{api.base}{path}", headers=ci)) for path in paths
        ]
        assert [stream.status for stream in streams] == [200, 200]
        for path in paths:
            found, answer, headers = await api.ask("GET", path, **ci)
            assert (found, headers["Retry-After"]) == (429, "10")
            assert answer["detail"] == "ci has 2 event streams, the most for one user; close some"
        assert await status(api, "GET", "/v1/jobs", **ci) == 200
        async with api.session.get(f"{api.base}{paths[0]}", headers=other) as stream:
            assert stream.status == 200, "others have theirs"
        api.service.tell(job["id"], "state", number=2, to="cancelled", cause="", **{"from": "queued"})
        await api.service.become(job["id"], JobState.CANCELLED)
        await streams[0].read()  # It ends, and its place is free.
        async with api.session.get(f"{api.base}{paths[0]}", headers=ci) as stream:
            assert stream.status == 200


@pytest.mark.promise("Security", "The client address that a proxy reports is used only if that proxy is trusted.")
async def test_a_proxy_says_who_asks_only_if_it_is_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncpipe.audit")
    for trusted in (["127.0.0.1"], []):
        async with served(tmp_path / str(len(trusted)), trusted_proxies=trusted) as api:
            await api.ask("POST", "/v1/jobs", submission(), X_Forwarded_For="6.6.6.6, 192.0.2.1")
    asked = [each.client for each in caplog.records if each.name == "asyncpipe.audit"]  # type: ignore[attr-defined]
    assert asked == ["192.0.2.1", "127.0.0.1"]
