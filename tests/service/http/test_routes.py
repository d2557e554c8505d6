"""Every route: what it answers, and what it says of a job that cannot do what it is asked."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from http_helpers import ENTRY, NOBODY, TOKEN, make_settings, mounted, served, submission
from yarl import URL

from asyncpipe.errors import OptionError
from asyncpipe.observe.http_hosts import is_own_page
from asyncpipe.service.http import serve_api
from asyncpipe.service.job_states import JobState
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.service.store.job_store import StoreError, StoreProblem

pytestmark = [pytest.mark.usefixtures("no_leaks")]


async def test_a_job_is_submitted_and_shown(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        status, job, headers = await api.ask("POST", "/v1/jobs", submission(weight=3))
        assert status == 201
        assert headers["Location"] == f"/v1/jobs/{job['id']}"
        assert (job["state"], job["name"], job["entry"], job["weight"]) == ("queued", "demo", ENTRY, 3.0)
        assert (job["schedule"], job["step"], job["steps"], job["waits_for"]) == ("gpipe", 0, 100, "a place")
        assert job["document"]["parameters"] == {"width": 8}
        status, shown, _ = await api.ask("GET", headers["Location"])
        assert (status, shown) == (200, job | {"waited_seconds": shown["waited_seconds"]})


async def test_devices_of_replicas_are_shown_one_behind_the_other(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        pipeline = {"devices": [["cpu:0"], ["cpu:1"]], "schedule": "gpipe"}
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(pipeline=pipeline))
        assert (job["devices"], job["replicas"]) == (["cpu:0", "cpu:1"], 2)
        assert (await api.ask("POST", "/v1/jobs", submission()))[1]["replicas"] == 1


async def test_the_same_key_gives_the_same_job(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        first = await api.ask("POST", "/v1/jobs", submission(), Idempotency_Key="one")
        again = await api.ask("POST", "/v1/jobs", submission(), Idempotency_Key="one")
        other = await api.ask("POST", "/v1/jobs", submission(name="else"), Idempotency_Key="one")
        assert (first[0], again[0], other[0]) == (201, 200, 409)
        assert first[1]["id"] == again[1]["id"] == other[1]["job"]
        assert again[2]["Location"] == first[2]["Location"]
        assert other[1]["type"].endswith(":idempotency-conflict")


async def test_jobs_are_listed_page_by_page_and_by_state(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        ids = [await api.submitted(name=f"job {number}") for number in range(5)]
        await api.ask("POST", f"/v1/jobs/{ids[1]}/cancel", {})
        found, after = [], ""
        while True:
            _, page, _ = await api.ask("GET", f"/v1/jobs?limit=2{after}")
            found += [job["id"] for job in page["jobs"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert found == ids[::-1]
        assert "document" not in page["jobs"][0]
        _, cancelled, _ = await api.ask("GET", "/v1/jobs?state=cancelled")
        assert [job["id"] for job in cancelled["jobs"]] == [ids[1]]
        _, both, _ = await api.ask("GET", "/v1/jobs?state=cancelled&state=queued")
        assert len(both["jobs"]) == 5


async def test_a_wrong_query_is_a_422_that_names_the_key(tmp_path: Path) -> None:
    wrong = ("limit=0", "limit=1001", "limit=x", "state=odd", "after=..", f"after={NOBODY}", "limit=" + "9" * 5000)
    async with mounted(tmp_path) as api:
        for query in wrong:
            status, answer, headers = await api.ask("GET", f"/v1/jobs?{query}")
            assert status == 422
            assert [problem["key"].partition(".")[0] for problem in answer["problems"]] == [query.split("=")[0]]
            assert headers["Content-Type"].startswith("application/problem+json")


async def test_lists_are_filtered(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        first = await api.submitted(name="first", tags=["night"])
        second = await api.submitted(name="second", tags=["night", "wide"])
        other = await api.submitted(name="other", deadline=4e9)
        await api.ask("POST", f"/v1/jobs/{first}/cancel", {})

        async def listed(query: str) -> list[str]:
            status, page, _ = await api.ask("GET", f"/v1/jobs?{query}")
            assert status == 200
            return [each["id"] for each in page["jobs"]]

        assert await listed("tag=night&state=queued") == [second]
        assert await listed("tag=night&tag=wide") == [second]
        assert await listed("text=OTHER") == [other]
        assert await listed("since=9e9") == await listed("entry=m:f") == []
        for wrong in ("tag=a%20b", "text=", "since=x", "entry=" + "x" * 201):
            status, answer, _ = await api.ask("GET", f"/v1/jobs?{wrong}")
            assert (status, answer["problems"][0]["key"].partition(".")[0]) == (422, wrong.partition("=")[0])
        status, answer, _ = await api.ask("POST", "/v1/jobs", submission(deadline=1.0))
        assert (status, answer["problems"][0]["key"]) == (422, "deadline")


async def test_names_and_beginnings_of_ids_are_taken_for_ids(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        one, *_ = [await api.submitted(name=name) for name in ("one", "two", "two")]
        for text in ("one", one[:24], one.upper()):
            status, answer, _ = await api.ask("GET", f"/v1/jobs/{text}")
            assert (status, answer["id"]) == (200, one)
        status, answer, _ = await api.ask("POST", "/v1/jobs/two/cancel", {})
        assert (status, answer["type"].rpartition(":")[2]) == (404, "ambiguous-job")
        assert [(each["name"], each["state"]) for each in answer["candidates"]] == [("two", "queued")] * 2
        for text in ("three", "x" * 300):
            assert (await api.ask("GET", f"/v1/jobs/{text}"))[0] == 404
        for after in ("three", "two"):
            status, answer, _ = await api.ask("POST", "/v1/jobs", submission(after=[after]))
            assert (status, answer["problems"][0]["key"]) == (422, "after")
        status, answer, _ = await api.ask("POST", "/v1/jobs", submission(deadline=1e9))
        assert (status, answer["problems"][0]["key"]) == (422, "deadline")


async def test_class_weight_and_tags_are_changed_and_nothing_else(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        one = await api.submitted(name="one", tags=["a"])
        status, answer, _ = await api.ask("PATCH", "/v1/jobs/one", {"priority_class": "background", "weight": 2.5})
        assert (status, answer["priority_class"], answer["weight"], answer["tags"]) == (200, "background", 2.5, ["a"])
        status, answer, _ = await api.ask("PATCH", f"/v1/jobs/{one}", {"tags": ["b"]})
        assert (status, answer["tags"], answer["weight"]) == (200, ["b"], 2.5)
        for wrong in ({"weight": 0}, {"priority_class": "urgent"}, {"tags": ["a b"]}, {"name": "x"}):
            status, answer, _ = await api.ask("PATCH", "/v1/jobs/one", wrong)
            assert (status, answer["problems"][0]["key"].partition(".")[0]) == (422, next(iter(wrong)))


async def test_actions_change_the_state_and_history_tells(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        for act, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
            status, answer, _ = await api.ask("POST", f"/v1/jobs/{job}/{act}", {})
            assert (status, answer["state"]) == (200, state)
        status, answer, _ = await api.ask("POST", f"/v1/jobs/{job}/resume", {})
        assert (status, answer["state"], answer["job"], answer["possible"]) == (409, "cancelled", job, ["queued"])
        status, answer, _ = await api.ask("GET", f"/v1/jobs/{job}/history")
        steps = [(row["from"], row["to"]) for row in answer["transitions"]]
        assert steps == [(None, "queued"), ("queued", "paused"), ("paused", "queued"), ("queued", "cancelled")]
        assert {row["cause"] for row in answer["transitions"][1:]} == {"asked for by a client"}


async def test_a_schedule_is_changed_by_name_only(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        assert (await api.ask("PUT", f"/v1/jobs/{job}/schedule", {"schedule": "1f1b"}))[0] == 200
        for wrong in ("csv:/etc/passwd", "os:system", "nothing", "", 1, None, "1f1b\n"):
            status, answer, _ = await api.ask("PUT", f"/v1/jobs/{job}/schedule", {"schedule": wrong})
            assert (status, [row["key"] for row in answer["problems"]]) == (422, ["schedule"]), wrong
        for body in ({}, [], {"schedule": "1f1b", "more": 1}, b'{"schedule": "\\ud800"}', b"{"):
            assert (await api.ask("PUT", f"/v1/jobs/{job}/schedule", body))[0] == (
                400 if isinstance(body, bytes) else 422
            )


async def test_losses_are_pages_of_numbers(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        losses = [0.5, math.nan, math.inf, 0.25]
        api.service.rows[job] = [LossRow(step, loss, 0.01, 0.1, 8) for step, loss in enumerate(losses, 1)]
        _, first, _ = await api.ask("GET", f"/v1/jobs/{job}/losses?limit=3")
        _, second, _ = await api.ask("GET", f"/v1/jobs/{job}/losses?limit=3&after={first['next']}")
        assert [row["loss"] for row in first["losses"] + second["losses"]] == [0.5, None, None, 0.25]
        assert second["next"] is None
        figures = {"step": 4, "loss": 0.25, "learning_rate": 0.01, "seconds": 0.1, "tokens": 8}
        assert second["losses"][0] == {**figures, "gradient_norm": None}


async def test_what_may_be_named(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        _, schedules, _ = await api.ask("GET", "/v1/schedules")
        assert {"gpipe", "1f1b"} <= set(schedules["schedules"])
        _, entries, _ = await api.ask("GET", "/v1/entries")
        assert [entry["name"] for entry in entries["entries"]] == [ENTRY]
        parameters = entries["entries"][0]["parameters"]
        assert (set(parameters["properties"]), parameters["description"]) == ({"width", "scale"}, "Trains nothing.")
        assert {"name", "entry", "pipeline", "training"} == set(entries["submission"]["required"])


async def test_devices_are_listed_with_their_runs(tmp_path: Path) -> None:
    async with mounted(tmp_path, memory_limit={"cpu:1": "1 GiB"}) as api:
        job = await api.submitted()
        await api.service.become(job, JobState.RUNNING)
        _, found, _ = await api.ask("GET", "/v1/devices")
        assert found["devices"] == [
            {"name": "cpu:0", "places": 1, "memory_limit": None},
            {"name": "cpu:1", "places": 1, "memory_limit": 2**30},
        ]
        (run,) = found["runs"]
        assert (run["job"], run["devices"], run["attempt"], run["ended"]) == (job, ["cpu:0", "cpu:1"], 1, None)
        assert run["began"] <= found["now"]


async def test_workers_are_listed_and_their_hosts_drained(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        status, answer, _ = await api.ask("GET", "/v1/workers")
        one, other = answer["workers"]
        assert (status, one["name"], one["host"], one["up"], one["pid"]) == (200, "a/cpu:0", "a", True, 7)
        assert (other["up"], other["draining"], other["heartbeat_seconds"]) == (False, False, None)
        assert (one["heartbeat_seconds"], one["round_trip_seconds"]) == (0.25, None)  # JSON has no infinity.
        for act, draining in (("drain", True), ("undrain", False)):
            status, answer, _ = await api.ask("POST", f"/v1/workers/b/{act}", {})
            assert (status, [row["host"] for row in answer["workers"]]) == (200, ["b"])
            assert answer["workers"][0]["draining"] is draining
        status, answer, _ = await api.ask("POST", "/v1/workers/nowhere/drain", {})
        assert (status, answer["type"].rpartition(":")[2]) == (404, "unknown-host")
        assert "there is no host 'nowhere'; the service has a, b" in answer["detail"]


async def test_probes(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        assert (await api.ask("GET", "/livez"))[0] == (await api.ask("GET", "/readyz"))[0] == 200
        await api.service.drain("shutting down")
        assert (await api.ask("GET", "/livez"))[0] == 200
        status, answer, headers = await api.ask("GET", "/readyz")
        assert (status, answer["detail"]) == (503, "shutting down")
        assert int(headers["Retry-After"]) > 0
        api.service.live = False
        assert (await api.ask("GET", "/livez"))[0] == 503


async def test_a_service_that_drains_takes_no_job(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        await api.service.drain("shutting down")
        status, answer, headers = await api.ask("POST", "/v1/jobs", submission())
        assert (status, answer["type"].rpartition(":")[2]) == (503, "draining")
        assert int(headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("problem", "status"), [(StoreProblem.FULL, 507), (StoreProblem.LOCKED, 503), (StoreProblem.CLOSED, 503)]
)
async def test_a_store_that_fails_is_told_without_its_path(tmp_path: Path, problem: StoreProblem, status: int) -> None:
    async with mounted(tmp_path) as api:
        api.service.error = StoreError(tmp_path / "jobs.sqlite3", problem, "has trouble", "help it")
        found, answer, _ = await api.ask("POST", "/v1/jobs", submission())
        assert found == status
        assert str(tmp_path) not in str(answer)


async def test_an_unexpected_error_is_a_number_that_the_log_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(tmp_path, token=TOKEN) as api:
        api.service.error = RuntimeError(f"secret in {tmp_path}")
        status, answer, _ = await api.ask("GET", f"/v1/jobs/{NOBODY}", Authorization=f"Bearer {TOKEN}")
        assert (status, set(answer)) == (500, {"type", "title", "status", "detail", "error"})
        assert "secret" not in str(answer)
        assert answer["error"] in caplog.text
        assert f"in GET /v1/jobs/{NOBODY}" in caplog.text
        assert "secret in" in caplog.text


ODD = [
    NOBODY,
    "x",
    "..",
    "%2e%2e",
    "%2e%2e%2f",
    "%00",
    "a%0ab",
    "%ff",
    "%C3%A9",
    "';%20drop%20table%20jobs;%20--",
    "1" * 3000,
]


async def test_unknown_jobs_are_404(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        for path in ("", "/history", "/losses", "/events", "/pause", "/resume", "/cancel", "/schedule"):
            method = {"/schedule": "PUT"}.get(path, "POST" if path in ("/pause", "/resume", "/cancel") else "GET")
            body = {"schedule": "gpipe"} if method == "PUT" else None
            for job in ODD:
                # What cannot be an id is not even looked for.
                api.service.error = None if job == NOBODY else AssertionError(job)
                place = URL(f"{api.base}/v1/jobs/{job}{path}", encoded=True)
                async with api.session.request(method, place, json=body) as answer:
                    assert answer.status == 404, (job, path)
                    assert len(await answer.text()) < 300


async def test_a_wrong_method_is_told_the_right_ones(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        for path, allowed in (
            ("/v1/jobs", {"GET", "POST"}),
            (f"/v1/jobs/{NOBODY}/pause", {"POST"}),
            ("/", {"GET", "HEAD"}),
        ):
            status, answer, headers = await api.ask("DELETE", path)
            assert (status, answer["status"]) == (405, 405)
            assert set(headers["Allow"].split(", ")) <= allowed


async def test_below_a_host_everything_is_the_same(tmp_path: Path) -> None:
    async with mounted(tmp_path, "/training") as api:
        status, job, headers = await api.ask("POST", "/v1/jobs", submission())
        assert (status, headers["Location"]) == (201, f"/training/v1/jobs/{job['id']}")
        _, document, _ = await api.ask("GET", "/v1/openapi.json")
        assert document["servers"] == [{"url": "/training"}]
        assert (await api.ask("GET", "/nothing"))[1]["status"] == 404
        assert (await api.ask("GET", "/v1/jobs", Host="evil.example"))[0] == 421
        _, page, _ = await api.ask("GET", "/")
        assert "jobs.js" in page
        status, _, headers = await api.ask("GET", f"/jobs/{job['id']}")
        assert (status, headers["Location"]) == (308, f"{job['id']}/")


async def test_it_listens_where_it_says(tmp_path: Path) -> None:
    async with served(tmp_path) as api:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", api.base)
        assert (await api.ask("GET", "/v1/jobs"))[0] == 200
        settings = make_settings(tmp_path, port=int(api.base.rpartition(":")[2]))
        with pytest.raises(OptionError, match=r"cannot serve the API on 127.*in use"):
            async with serve_api(api.service, settings):  # type: ignore[arg-type]
                pass


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://a:80", "a", True),
        ("https://a", "a", True),
        ("https://a", "a:80", False),
        ("http://A", "a", True),
        ("http://a:81", "a", False),
        ("http://b", "a", False),
        ("null", "a", False),
        ("ftp://a", "a", False),
        ("http://", "", False),
        ("http://[::1]:8080", "[::1]:8080", True),
        ("http://a:99999", "a", False),
        ("https://known:1", "a", True),
    ],
)
def test_which_pages_are_ours(origin: str, host: str, own: bool) -> None:
    assert is_own_page(origin, host, {"known"}) is own
