"""Tests on an emulated accelerator, which changes the process: they run in one of their own.

``tests/pipeline/test_on_emulated_accelerator.py`` starts it. By hand: ``ASYNCPIPE_EMULATED=1 pytest tests/emulated``.
"""

import os

import pytest

collect_ignore_glob = [] if "ASYNCPIPE_EMULATED" in os.environ else ["test_*.py"]

if not collect_ignore_glob:
    from asyncpipe.ops.device import device_clock, lent_streams
    from asyncpipe.runtime import driver
    from tests.emulated import device as emu

    @pytest.fixture(autouse=True)
    def healthy(monkeypatch):
        """A device that works, forgets what was before, and whose clock is read once."""
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        monkeypatch.setattr(device_clock, "_clocks", {})
        monkeypatch.setattr(device_clock, "LASTS", 1e9)
        # As far ahead as in_flight says, also where this machine is slow: steps are issued while kernels are held.
        monkeypatch.setattr(driver, "AHEAD_SECONDS", 1e9)
        monkeypatch.setattr(lent_streams, "_unused", {})
        monkeypatch.setattr(lent_streams, "_made", {})
        emu.reset()
        yield
        emu.reset()
