"""How the descriptors of a process are divided, and what is said where there are too few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.errors import OptionError
from asyncpipe.service.descriptors import CONNECTION, budget_descriptors
from asyncpipe.service.settings.service_settings import ServiceSettings


def settings(**given: Any) -> ServiceSettings:
    return ServiceSettings(**{"devices": ["cpu:0", "cpu:1"], "entries": ["charlm:build"]} | given)


def test_connections_get_what_is_left() -> None:
    whole = budget_descriptors(settings(), None)
    assert whole.connections == 1000
    assert budget_descriptors(settings(), 10**6) == whole
    parts = whole.service + whole.jobs + whole.workers + whole.metrics + whole.probes
    assert whole.limit == parts + CONNECTION * whole.connections
    few = budget_descriptors(settings(), 1024)
    assert few.limit == 1024
    assert few.connections == (1024 - parts) // CONNECTION
    assert budget_descriptors(settings(max_running=8, metrics_port=None), 1024).connections < few.connections
    assert budget_descriptors(settings(workers="processes"), 1024).workers > 0
    assert str(few).startswith("1024 descriptors: ")


def test_what_was_asked_for_is_not_made_less() -> None:
    with pytest.raises(OptionError, match=r"may open 1024 files, and needs 2368.*raise the hard limit"):
        budget_descriptors(settings(max_connections=1000), 1024)
    assert budget_descriptors(settings(max_connections=300), 1024).connections == 300
    with pytest.raises(OptionError, match="may open 256 files, and needs 400"):
        budget_descriptors(settings(), 256)


def test_the_soft_limit_is_raised_as_far_as_needed(tmp_path: Path) -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 5000))\n"
        "from asyncpipe.service.descriptors import raise_limit\n"
        "from asyncpipe.service.settings.service_settings import ServiceSettings\n"
        "budget = raise_limit(ServiceSettings(devices=['cpu:0'], entries=['a:b']))\n"
        "print(budget.connections, *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "2368", "5000"]
