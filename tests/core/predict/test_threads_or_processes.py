"""How busy the interpreter's lock would be decides between threads and processes, and the reason names the figures."""

import pytest

from asyncpipe.core.predict.threads_or_processes import threads_or_processes


@pytest.mark.parametrize(
    ("processor", "workers", "busy"),
    [(0.002, "threads", "2%"), (0.0599, "threads", "60%"), (0.06, "processes", "60%"), (0.115, "processes", "115%")],
)
def test_from_sixty_per_cent_on_it_is_processes(processor, workers, busy):
    chosen, why = threads_or_processes(4, 160, processor, 0.1)
    assert chosen == workers
    each = f"{processor / 160 * 1e6:.3g} µs"
    assert f"160 tasks in 100 ms on 4 devices, each with {each} of processor time" in why
    assert f"{busy} busy ({workers}: {'less than' if workers == 'threads' else 'at least'} 60%)" in why
