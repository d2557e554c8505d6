"""A web application that trains models beside its own work: asyncpipe's service in an application of FastAPI.

    uvicorn --factory --app-dir examples/embedded_service --timeout-graceful-shutdown 5 app:application

Then open http://127.0.0.1:8000/. The application keeps its loop, its signals and its routes; training has a loop and
threads of its own. The service's pages and API are mounted at ``/training/``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from asyncpipe import TrainingService
from asyncpipe.service.http import make_api
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.submission.submission import SubmissionError

HERE = Path(__file__).parent

JOB: dict[str, Any] = {
    "name": "language-model",
    "entry": "charlm:build",
    "parameters": {"width": 48, "heads": 4, "blocks": 2, "context": 32, "max_bytes": 200_000},
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "schedule": "1f1b"},
    "training": {"batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 20},
    "snapshots": {"every": 50},
}


def make_app(settings: ServiceSettings) -> FastAPI:
    """The application; training starts and stops with it."""
    service = TrainingService(settings)
    training = make_api(service, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service, training.router.lifespan_context(training):
            yield

    app = FastAPI(title="An application that trains", lifespan=lifespan)
    app.state.service = service
    app.mount("/training", training)
    app.get("/", response_class=HTMLResponse)(hello)
    app.post("/models", status_code=201)(train)
    app.get("/models/{job}")(progress)
    return app


async def hello(request: Request) -> str:
    """The application's own page."""
    status = request.app.state.service.status()
    return f'<p>Hello! {status.running} models are in training: <a href="training/">watch them</a>.</p>'


async def train(
    request: Request, response: Response, steps: int = 200, idempotency_key: Annotated[str | None, Header()] = None
) -> dict[str, Any]:
    """Train a model for ``steps`` steps; a request with the same ``Idempotency-Key`` trains no second model."""
    job = {**JOB, "training": {**JOB["training"], "steps": steps}}
    try:
        record, is_new = await request.app.state.service.submit(job, idempotency_key)
    except SubmissionError as error:
        raise HTTPException(422, str(error)) from error
    response.status_code = 201 if is_new else 200
    return {"id": record.id, "state": record.state}


async def progress(request: Request, job: str) -> dict[str, Any]:
    """The progress of a model."""
    service: TrainingService = request.app.state.service
    try:
        record = await service.get(job)
    except UnknownJobError as error:
        raise HTTPException(404, str(error)) from error
    losses = await service.losses(job, after=max(0, record.step - 1))
    last = {"step": losses[-1].step, "loss": losses[-1].loss} if losses else {"step": 0, "loss": None}
    return {"state": record.state, **last}


def application() -> FastAPI:
    """What uvicorn serves; its files are in ``runs/embedded``."""
    settings = ServiceSettings(
        devices=["cpu:0", "cpu:1"], entries=["charlm:build"], entry_path=HERE.parent / "charlm", folder="runs/embedded"
    )
    return make_app(settings)
