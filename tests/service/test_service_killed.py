"""A service that is killed at any instant goes on by itself, and what it trains is what it would have trained anyway.

``asyncpipe serve`` runs the example as four stages, with dropout, and a smaller job beside it, on threads and in
processes of their own in turn. The service is killed again and again, and so are processes of jobs, at random or aimed
at something that is under way; it is started again with the same settings, and no job is submitted again. In the end
the loss curve and the last snapshot have the bits of a run that was never interrupted, and all that clients had been
told is there. ``ASYNCPIPE_KILLS`` is the number of kills, ``ASYNCPIPE_KILL_SEED`` draws the instants.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
from kill_campaign import kill_again_and_again

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform == "win32", reason="this system has no SIGKILL"),
    pytest.mark.skipif(
        find_spec("pydantic_settings") is None,
        reason="a service needs its extra: pip install -e '.[service]'",
    ),
]

KILLS = int(os.environ.get("ASYNCPIPE_KILLS", "2"))
SEED = int(os.environ.get("ASYNCPIPE_KILL_SEED", "6"))


@pytest.mark.promise(
    "Killed and resumed",
    "A service that is killed at any moment resumes its jobs, and they end with bit-identical results.",
)
@pytest.mark.timeout(120 + 30 * KILLS)
def test_the_service_goes_on_by_itself_and_what_it_trains_is_the_same_to_the_last_bit(tmp_path, capsys):
    done = kill_again_and_again(tmp_path, KILLS, SEED)
    with capsys.disabled():
        print(f"\n{done.moments.total()} kills (seed {SEED}) of {done.jobs} jobs, when")
        for moment, count in done.moments.most_common():
            print(f"  {count:3} x {moment}")
        print(f"  {done.redone} steps were done again; {done.tensors} tensors and all losses have the same bits;")
        print(f"  {done.events} events and {done.snapshots} snapshots that were told are there")
