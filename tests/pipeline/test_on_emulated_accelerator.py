"""The tests in ``tests/emulated``, in a process of their own: registering a device changes torch for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="before torch 2.10, a device cannot be written in Python",
)
def test_on_an_emulated_accelerator():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/emulated"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "ASYNCPIPE_EMULATED": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
