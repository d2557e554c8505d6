"""Retry, fork and delete over HTTP, by the clients and the command line."""

from __future__ import annotations

import asyncio

import pytest
from http_helpers import job, real

from asyncpipe import cli
from asyncpipe.service.client import ApiError, JobClient


async def test_a_client_retries_forks_and_deletes(tmp_path, capsys):
    async with real(tmp_path) as api:
        client = JobClient(api.base)
        first = (await api.service.submit(job(steps=10**6, snapshots={"every": 2})))[0].id

        def talk() -> None:
            cli_args = ["--url", api.base]
            assert cli.main(["jobs", "cancel", first, *cli_args]) == 0
            client.wait(first)
            assert cli.main(["jobs", "retry", first, "--from-step", "0", "--set", "training.steps=4", *cli_args]) == 0
            assert client.wait(first)["state"] == "finished"
            assert client.show(first)["steps"] == 4
            capsys.readouterr()
            assert (
                cli.main(["jobs", "fork", first, "--set", "name=longer", "--set", "training.steps=6", *cli_args]) == 0
            )
            fork = capsys.readouterr().out.strip()
            assert (client.show(fork)["name"], client.wait(fork)["step"]) == ("longer", 6)
            assert cli.main(["jobs", "delete", fork, "--dry-run", *cli_args]) == 0
            assert f"would delete job {fork} (longer, finished)" in capsys.readouterr().out
            assert client.show(fork)["id"] == fork
            assert cli.main(["jobs", "delete", fork, *cli_args]) == 0
            assert f"deleted job {fork}" in capsys.readouterr().out
            for wrong, status in ((lambda: client.show(fork), 404), (lambda: client.retry(first), 409)):
                with pytest.raises(ApiError) as caught:
                    wrong()
                assert caught.value.status == status
            assert cli.main(["jobs", "fork", first, "--set", "training.stepz=6", *cli_args]) == 2
            assert "training.stepz" in capsys.readouterr().err
            assert cli.main(["jobs", "fork", first, "--from-step", "3", *cli_args]) == 2
            assert "has no snapshot of step 3" in capsys.readouterr().err

        await asyncio.to_thread(talk)
