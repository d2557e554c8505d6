"""``asyncpipe doctor``: what works here, and what to do about the rest."""

from __future__ import annotations

import socket

import pytest
import torch

from asyncpipe.cli import doctor, main


def told(output: str) -> dict[str, list[str]]:
    """By mark, what was looked at."""
    lines = [line for line in output.splitlines() if not line.startswith(" ")]
    return {mark: [line[7:20].strip() for line in lines if line.startswith(mark)] for mark in ("ok", "note", "FAILS")}


def test_it_says_what_works_and_what_to_do(capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "API"})
        monkeypatch.setattr(doctor, "OPTIONAL", {"cli": "rich", "missing": "no-such-package"})
        assert main(["doctor", "--quick"]) == 0
    output = capsys.readouterr().out
    assert {"versions", "torch", "CPU", "shared memory", "packages"} <= set(told(output)["ok"])
    assert {f"port {port}", "extras"} <= set(told(output)["note"])
    assert "pip install -e '.[missing]'" in output
    assert "--port" in output


def test_gpus_have_lines_of_their_own_and_what_fails_is_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "A GPU")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)

    def _workers():
        raise OSError("no worker starts")

    monkeypatch.setattr(doctor, "_workers", _workers)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "A GPU, 1.0 of 2.0 GiB free" in output
    assert "not 1>0" in output
    assert told(output)["FAILS"] == ["workers"]
    assert "OSError: no worker starts" in output


@pytest.mark.long
def test_two_workers_make_a_step(capsys):
    assert main(["doctor"]) == 0
    assert "workers" in told(capsys.readouterr().out)["ok"]
