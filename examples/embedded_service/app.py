"""A web application that trains models beside its own work: asyncpipe's service embedded in aiohttp.

    python examples/embedded_service/app.py        # then open http://127.0.0.1:8000/

The application keeps its loop, its signals and its routes; training has a loop and threads of its own. The service's
pages and API are mounted at ``/training/``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from asyncpipe import TrainingService
from asyncpipe.service.http import make_api
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.submission.submission import SubmissionError

HERE = Path(__file__).parent
SERVICE = web.AppKey("service", TrainingService)

JOB: dict[str, Any] = {
    "name": "language-model",
    "entry": "charlm:build",
    "parameters": {"width": 48, "heads": 4, "blocks": 2, "context": 32, "max_bytes": 200_000},
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "schedule": "1f1b"},
    "training": {"batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 20},
    "snapshots": {"every": 50},
}


def make_app(settings: ServiceSettings) -> web.Application:
    """The application; training starts and stops with it."""
    service = TrainingService(settings)

    async def training(_: web.Application) -> AsyncIterator[None]:
        async with service:
            yield

    app = web.Application()
    app[SERVICE] = service
    app.cleanup_ctx.append(training)
    app.add_subapp("/training/", make_api(service, settings))
    app.router.add_get("/", hello)
    app.router.add_post("/models", train)
    app.router.add_get("/models/{id}", progress)
    return app


async def hello(request: web.Request) -> web.Response:
    """The application's own page."""
    status = request.app[SERVICE].status()
    page = f'<p>Hello! {status.running} models are in training: <a href="training/">watch them</a>.</p>'
    return web.Response(text=page, content_type="text/html")


async def train(request: web.Request) -> web.Response:
    """Train a model for ``steps`` steps; a request with the same ``Idempotency-Key`` trains no second model."""
    steps = request.query.get("steps", "200")
    job = {**JOB, "training": {**JOB["training"], "steps": int(steps) if steps.isdecimal() else steps}}
    try:
        record, is_new = await request.app[SERVICE].submit(job, request.headers.get("Idempotency-Key"))
    except SubmissionError as error:
        raise web.HTTPUnprocessableEntity(text=f"{error}\n") from error
    return web.json_response({"id": record.id, "state": record.state}, status=201 if is_new else 200)


async def progress(request: web.Request) -> web.Response:
    """The progress of a model."""
    service, job = request.app[SERVICE], request.match_info["id"]
    try:
        record = await service.get(job)
    except UnknownJobError as error:
        raise web.HTTPNotFound(text=f"{error}\n") from error
    losses = await service.losses(job, after=max(0, record.step - 1))
    last = {"step": losses[-1].step, "loss": losses[-1].loss} if losses else {"step": 0, "loss": None}
    return web.json_response({"state": record.state, **last})


def main() -> None:
    """Serve on this machine alone."""
    settings = ServiceSettings(
        devices=["cpu:0", "cpu:1"], entries=["charlm:build"], entry_path=HERE.parent / "charlm", folder="runs/embedded"
    )
    web.run_app(make_app(settings), host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
