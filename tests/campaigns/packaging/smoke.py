"""Uses an installed asyncpipe as a stranger would: ``python smoke.py EXTRAS``, in an empty folder."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import asyncpipe

PROGRAM = Path(sys.executable).with_name("asyncpipe")
PAGES = {
    "observe/live": ("live.css", "live.html", "live.js", "charts.js", "vendor/uPlot.iife.min.js", "vendor/LICENSE"),
    "service/http/web": ("job.js", "jobs.css", "jobs.html", "jobs.js"),
    "observe/pictures": ("comparison.html",),
}


def files() -> None:
    """The package is the installed one, and has its pages and its mark of types."""
    folder = Path(asyncpipe.__file__).parent
    assert "site-packages" in folder.parts, folder
    assert (folder / "py.typed").exists()
    for place, names in PAGES.items():
        assert all((folder / place / name).stat().st_size for name in names), place


def command(*arguments: str, status: int = 0) -> str:
    """What the command prints."""
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def commands(extras: str) -> None:
    """The command line works; what needs an extra says which."""
    assert "COMMAND" in command("--help")
    assert ("zb-h1" if extras else "[cli]") in command("schedule", "list", status=0 if extras else 2)
    assert "makespan 14, bubble 14.3%" in command("schedule", "show", "zb-h1", "--stages", "3", "--microbatches", "4")
    assert "<svg" in command("schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--format", "html")
    if not extras:
        assert "[service]" in command("serve", "--entries", "json:loads", "--devices", "cpu:0", status=2)


def step(**options: object) -> None:
    """A step on two devices has the gradients, or the update, of the unsplit model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x, target = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    nn.functional.mse_loss(model(x), target).backward()
    wanted = {name: value.detach() - value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    with asyncpipe.Pipeline(
        model,
        ["cpu:0", "cpu:1"],
        microbatches=4,
        balance=[2, 1],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        **options,
    ).sync() as pipe:
        pipe.step(x, target)
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)


async def service() -> None:
    """A service and a live page answer."""
    from urllib.request import urlopen

    from asyncpipe.observe.live import LiveView, serve_live
    from asyncpipe.service.http import serve_api
    from asyncpipe.service.settings.service_settings import ServiceSettings

    settings = ServiceSettings(folder=Path("service"), devices=["cpu:0"], entries=["json:loads"], port=0)

    def read(url: str) -> str:
        with urlopen(url, timeout=30) as answer:
            return answer.read().decode()

    async with asyncpipe.TrainingService(settings) as running, serve_api(running, settings) as url:
        for path in ("readyz", "v1/openapi.json", ""):
            assert await asyncio.to_thread(read, f"{url}{path}"), path
    async with serve_live(LiveView("smoke"), port=0) as server:
        assert "<html" in await asyncio.to_thread(read, server.url)


def main(extras: str) -> None:
    """Everything that works with these extras."""
    print(f"torch {torch.__version__}")
    files()
    commands(extras)
    step()
    step(workers="processes")
    assert (importlib.util.find_spec("fastapi") is not None) == bool(extras)
    if extras:
        asyncio.run(service())
    print(f"asyncpipe {asyncpipe.__version__} works with {extras or 'no extras'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
