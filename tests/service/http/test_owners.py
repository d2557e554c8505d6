"""Whose jobs one sees and changes over HTTP: a rule for every route of the application, also for one that is new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_helpers import NOBODY, Api, mounted, submission

from asyncpipe.service.job_states import JobState
from asyncpipe.service.token_roles import TokenRole, create_token

pytestmark = [pytest.mark.usefixtures("no_leaks")]

FOR_ALL = {
    "/v1/jobs": "only jobs that one sees",
    "/v1/counts": "only of jobs that one sees",
    "/v1/failures": "only jobs that one sees",
    "/v1/workers": "only jobs that one sees",
    "/v1/workers/{host}/drain": "by operators",
    "/v1/workers/{host}/undrain": "by operators",
    "/v1/me": "of who asks",
    "/v1/devices": "when others used a device, not who",
    "/devices": "a page",
    "/submit": "a page",
    "/v1/schedules": "nothing of jobs",
    "/v1/entries": "nothing of jobs",
    "/v1/openapi.json": "nothing of jobs",
    "/livez": "nothing of jobs",
    "/readyz": "nothing of jobs",
}
"""What routes that name no job show of jobs: each is here, or fails the first test, so that nobody forgets it."""
BODIES: dict[str, Any] = {"change_schedule": {"schedule": "1f1b"}, "fork": {"from_step": 0}, "retry": {"from_step": 0}}


def headers(api: Api, user: str, role: str = "submit", *teams: str) -> dict[str, str]:
    """Headers with a new token of ``user``."""
    folder = api.service.settings.folder
    secret, _ = create_token(folder, f"{user}-{role}", TokenRole(role), user=user, teams=teams)
    return {"Authorization": f"Bearer {secret}"}


def routes_of(app: Any) -> list[Any]:
    """All routes, those of routers as well, which FastAPI keeps by themselves."""
    return [
        found for each in app.routes for found in ([each] if hasattr(each, "path") else each.original_router.routes)
    ]


def of_jobs(api: Api) -> Iterator[tuple[str, str, str]]:
    """Method, path and name of each route that names a job."""
    for route in routes_of(api.app):
        if "{id}" in route.path:
            for method in sorted(set(route.methods) - {"HEAD"}):
                yield method, route.path, route.name


async def first(api: Api, method: str, path: str, name: str, job: str, who: dict[str, str]) -> tuple[int, str]:
    """The status and the beginning of the body that a route answers about ``job``; of a stream it reads no more."""
    url = api.base + path.replace("{id}", job).replace("{name}", "log.jsonl")
    data = None if method == "GET" else json.dumps(BODIES.get(name, {})).encode()
    asked = api.session.request(
        method, url, data=data, headers={**who, "Content-Type": "application/json"}, allow_redirects=False
    )
    async with asked as answer:
        text = "" if answer.content_type == "text/event-stream" else (await answer.text())
        return answer.status, text.replace(job, "ID")


def test_each_route_has_a_rule(tmp_path: Path) -> None:
    from http_helpers import make_settings

    from asyncpipe.service.http import make_api
    from asyncpipe.service.training_service import TrainingService

    settings = make_settings(tmp_path)
    paths = {route.path for route in routes_of(make_api(TrainingService(settings), settings))}
    files = {path for path in paths if path == "/" or ("." in path and not path.startswith("/v1"))}
    assert {path for path in paths - files if "{id}" not in path} == FOR_ALL.keys()


async def test_a_job_that_one_may_not_see_does_not_exist_on_any_route(tmp_path: Path) -> None:
    async with mounted(tmp_path, others="none") as api:
        alice, bob = headers(api, "alice"), headers(api, "bob")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(name="secret"), **alice)
        routes = list(of_jobs(api))
        assert len(routes) > 15
        for method, path, name in routes:
            nobody = await first(api, method, path, name, NOBODY, bob)
            for text in (job["id"], job["id"][:12], "secret"):
                assert await first(api, method, path, name, text, bob) == nobody, (method, path, text)
            assert nobody[0] == 404 or path == "/jobs/{id}/", path  # That page is the same for all.
            if path != "/jobs/{id}/":
                assert (await first(api, "GET", path, name, job["id"], alice))[0] in (200, 308, 405), path
        assert (await api.service.get(job["id"])).state is JobState.QUEUED


async def test_of_a_device_one_sees_when_others_used_it_and_not_who(tmp_path: Path) -> None:
    async with mounted(tmp_path, others="none") as api:
        alice, bob = headers(api, "alice"), headers(api, "bob")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **alice)
        await api.service.become(job["id"], JobState.RUNNING)
        for who, seen in ((alice, (job["id"], "alice")), (bob, ("", None))):
            (run,) = (await api.ask("GET", "/v1/devices", **who))[1]["runs"]
            assert ((run["job"], run["owner"]), run["ended"]) == (seen, None)


async def test_what_one_sees_of_others_one_does_not_change(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        alice, bob = headers(api, "alice", "submit", "vision"), headers(api, "bob", "submit", "vision")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **alice)
        for method, path, name in of_jobs(api):
            status, text = await first(api, method, path, name, job["id"], bob)
            if method == "GET" or name == "fork":
                assert status in (200, 201, 308), (path, text)
                continue
            verb = {"change_schedule": "change"}.get(name, name)
            detail = f"job ID belongs to alice; you are bob: only alice and operators may {verb} it"
            assert (status, json.loads(text)["detail"], json.loads(text)["type"][-9:]) == (403, detail, "not-yours")
        assert (await api.service.get(job["id"])).state is JobState.QUEUED
        copies = [each for each in await api.service.store.list() if each.id != job["id"]]
        assert [(each.owner, each.teams) for each in copies] == [("bob", ("vision",))], "a copy is his who makes it"


@pytest.mark.parametrize(
    ("who", "role", "team_access", "cancel", "delete"),
    [
        ("alice", "submit", "none", 200, 200),
        ("alice", "read", "none", 403, 403),
        ("bob", "submit", "none", 404, 404),
        ("bob", "submit", "read", 403, 403),
        ("bob", "submit", "change", 200, 403),
        ("bob", "operate", "none", 200, 200),
    ],
)  # fmt: skip
async def test_who_may_change_what(
    tmp_path: Path, who: str, role: str, team_access: str, cancel: int, delete: int
) -> None:
    async with mounted(tmp_path, team_access=team_access, others="none") as api:
        alice = headers(api, "alice", "submit", "nlp", "vision")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **alice)
        asks = alice if (who, role) == ("alice", "submit") else headers(api, who, role, "vision", "audio")
        stranger = headers(api, "carol", "submit", "audio")
        assert (await api.ask("GET", f"/v1/jobs/{job['id']}", **stranger))[0] == 404
        assert (await api.ask("POST", f"/v1/jobs/{job['id']}/cancel", {}, **asks))[0] == cancel
        if cancel != 200:
            await api.service.become(job["id"], JobState.CANCELLED)
        status, answer, _ = await api.ask("DELETE", f"/v1/jobs/{job['id']}", **asks)
        assert status == delete
        if (team_access, role) == ("change", "submit"):
            assert answer["detail"].endswith("you are bob: only alice and operators may delete it")


async def test_jobs_without_an_owner_are_the_operators(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()  # Nobody has a token yet.
        bob, operator = headers(api, "bob"), headers(api, "carol", "operate")
        assert (await api.ask("GET", f"/v1/jobs/{job}", **bob))[1]["owner"] is None
        status, answer, _ = await api.ask("POST", f"/v1/jobs/{job}/cancel", {}, **bob)
        detail = f"job {job} belongs to nobody; you are bob: only operators may cancel it"
        assert (status, answer["detail"]) == (403, detail)
        _, answer, _ = await api.ask("POST", f"/v1/jobs/{job}/cancel", {}, **operator)
        assert (answer["state"], answer["cause"]) == ("cancelled", "asked for by carol")


async def test_lists_names_and_counts_have_only_what_one_sees(tmp_path: Path) -> None:
    async with mounted(tmp_path, others="none") as api:
        alice, bob = headers(api, "alice", "submit", "vision"), headers(api, "bob", "submit", "vision")
        carol, operator = headers(api, "carol"), headers(api, "dan", "operate")
        ids = {}
        for number, who in enumerate((alice, alice, bob, carol)):
            _, job, _ = await api.ask("POST", "/v1/jobs", submission(name="same"), **who)
            ids[number] = job["id"]
        await api.service.become(ids[0], JobState.CANCELLED)

        async def listed(who: dict[str, str], query: str = "") -> list[str]:
            return [each["id"] for each in (await api.ask("GET", f"/v1/jobs{query}", **who))[1]["jobs"]]

        assert await listed(carol) == [ids[3]]
        assert await listed(alice) == await listed(bob) == [ids[2], ids[1], ids[0]], "a team sees its jobs"
        assert await listed(operator) == [ids[3], ids[2], ids[1], ids[0]]
        assert await listed(alice, "?owner=bob") == [ids[2]]
        assert await listed(alice, "?owner=carol") == await listed(alice, "?text=zzz") == []
        assert await listed(alice, f"?after={ids[2]}&state=cancelled&state=queued&limit=1") == [ids[1]]
        # The id of a job that is not to be seen says as little as one of no job.
        hidden, no = [(await api.ask("GET", f"/v1/jobs?after={job}", **alice))[:2] for job in (ids[3], NOBODY)]
        assert hidden == no
        assert no[0] == 422
        # Names and beginnings of ids.
        assert (await api.ask("GET", "/v1/jobs/same", **carol))[1]["id"] == ids[3]
        status, answer, _ = await api.ask("GET", "/v1/jobs/same", **bob)
        assert (status, [each["id"] for each in answer["candidates"]]) == (404, [ids[2], ids[1], ids[0]])
        # Counts, and whether anything has changed.
        counts = {name: (await api.ask("GET", "/v1/counts", **who))[1] for name, who in
                  {"carol": carol, "bob": bob, "dan": operator}.items()}  # fmt: skip
        assert [each["states"]["queued"] for each in counts.values()] == [1, 2, 3]
        assert [each["states"]["cancelled"] for each in counts.values()] == [0, 1, 1]
        await api.service.become(ids[2], JobState.PAUSED)
        after = {name: (await api.ask("GET", "/v1/counts", **who))[1]["sequence"] for name, who in
                 {"carol": carol, "bob": bob, "dan": operator}.items()}  # fmt: skip
        assert [after[name] > counts[name]["sequence"] for name in after] == [False, True, True]
        # What workers do.
        await api.service.become(ids[3], JobState.RUNNING)
        api.service.on_workers = (ids[3], ids[2])
        for who, jobs in ((alice, []), (carol, [ids[3]]), (operator, [ids[3], ids[2]])):
            workers = (await api.ask("GET", "/v1/workers", **who))[1]["workers"]
            assert [each["jobs"] for each in workers] == [jobs] * 2
        # How jobs have failed.
        await api.service.store.transition(ids[3], JobState.FAILED, "because", root="ValueError: carol's")
        for who, number in ((alice, 0), (carol, 1), (operator, 1)):
            assert len((await api.ask("GET", "/v1/failures", **who))[1]["failures"]) == number


async def test_each_user_has_idempotency_keys_of_his_own(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        alice, bob = headers(api, "alice"), headers(api, "bob")
        made = [
            await api.ask("POST", "/v1/jobs", submission(name=name), Idempotency_Key="night", **who)
            for who, name in ((alice, "a"), (bob, "b"), (alice, "a"), (bob, "a"))
        ]
        assert [status for status, _, _ in made] == [201, 201, 200, 409]
        ids = [made[0][1]["id"], made[1][1]["id"], made[2][1]["id"], made[3][1]["job"]]
        assert ids == [ids[0], ids[1], ids[0], ids[1]]
        # Nobody gets to a key of somebody else by what a key may have.
        status, _, _ = await api.ask("POST", "/v1/jobs", submission(name="b"), Idempotency_Key="alice night", **bob)
        assert status == 201


async def test_who_asks_is_told_who_that_is(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        assert (await api.ask("GET", "/v1/me"))[1] == {
            "user": None, "role": "operate", "teams": [], "team_access": "change",
        }  # fmt: skip
        alice = headers(api, "alice", "submit", "vision", "nlp")
        assert (await api.ask("GET", "/v1/me", **alice))[1] == {
            "user": "alice", "role": "submit", "teams": ["vision", "nlp"], "team_access": "read",
        }  # fmt: skip
