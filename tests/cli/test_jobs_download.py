"""``asyncpipe jobs artifacts`` and ``download`` against a client that has files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncpipe import cli

JOB = "01k8zq1m7h9x2v4n6r8t0w3y5b"
WHOLE = [
    {"name": "model.pt", "step": 40, "size": 1234, "sha256": "…"},
    {"name": "model.pt", "step": 20, "size": 1234, "sha256": "…"},
    {"name": "losses.csv", "step": None, "size": None, "sha256": None},
]
BY_STAGE = [{"name": f"model-{stage}.pt", "step": step} for step in (40, 20) for stage in range(2)]


class Client:
    """Has artifacts, and writes what it is asked for."""

    def __init__(self, listed: list[dict[str, Any]]) -> None:
        self.listed = listed
        self.asked: list[tuple[str, int | None]] = []

    def artifacts(self, _: str) -> tuple[dict[str, Any], ...]:
        return tuple(self.listed)

    def download(self, _: str, name: str, to: Path, *, step: int | None = None) -> Path:
        self.asked.append((name, step))
        path = to / name if to.is_dir() else to
        path.write_bytes(b"x" * 1234)
        return path


@pytest.fixture
def download(monkeypatch):
    """``asyncpipe jobs download`` by a client."""

    def run(client: Client, *words: str) -> int:
        monkeypatch.setattr("asyncpipe.service.client.JobClient", lambda *_, **__: client)
        return cli.main(["jobs", "download", JOB, *words])

    return run


@pytest.mark.parametrize(
    ("listed", "words", "asked"),
    [
        (WHOLE, (), [("model.pt", None)]),
        (WHOLE, ("--step", "20"), [("model.pt", 20)]),
        (WHOLE, ("model", "losses", "log", "trace"), [
            ("model.pt", None), ("losses.jsonl", None), ("log.jsonl", None), ("trace.json", None),
        ]),
        (WHOLE, ("losses.csv", "model.pt", "--step", "20"), [("losses.csv", None), ("model.pt", 20)]),
        (BY_STAGE, (), [("model-0.pt", 40), ("model-1.pt", 40)]),
        (BY_STAGE, ("--step", "20"), [("model-0.pt", 20), ("model-1.pt", 20)]),
    ],
)  # fmt: skip
def test_what_is_named_is_downloaded(listed, words, asked, tmp_path, download, capsys):
    client = Client(listed)
    assert download(client, *words, "--to", str(tmp_path)) == 0
    assert client.asked == asked
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / name}: 1,234 bytes" for name, _ in asked]


def test_what_cannot_be_is_told(tmp_path, download, capsys):
    for listed, words, told in (
        (WHOLE, ("--step", "30"), "after these steps: 40, 20"),
        ([], (), "after these steps: none yet"),
        (
            BY_STAGE,
            ("--to", str(tmp_path / "no")),
            "/no for model-0.pt, model-1.pt",
        ),
    ):
        assert download(Client(listed), *words) == 2
        assert told in capsys.readouterr().err


def test_artifacts_are_a_table_or_json(monkeypatch, capsys):
    monkeypatch.setattr("asyncpipe.service.client.JobClient", lambda *_, **__: Client(WHOLE))
    assert cli.main(["jobs", "artifacts", JOB]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "STEP", "BYTES"], ["model.pt", "40", "1,234"], ["model.pt", "20", "1,234"], ["losses.csv"],
    ]  # fmt: skip
    assert cli.main(["jobs", "artifacts", JOB, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == WHOLE
