"""A web application that trains models beside its own work: asyncpipe's service in an application of FastAPI.

    uvicorn --factory --app-dir examples/embedded_service --timeout-graceful-shutdown 5 app:application

Then open http://127.0.0.1:8000/. The service's pages and API are mounted at ``/training/``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from asyncpipe import TrainingService
from asyncpipe.service.http import make_api
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.submission.submission import SubmissionError

Key = Annotated[str | None, Header()]
CHARLM = Path(__file__).parents[1] / "charlm"
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
    app.mount("/training", training)

    @app.get("/", response_class=HTMLResponse)
    async def hello() -> str:
        return f'<p>Hello! {service.status().running} models are in training: <a href="training/">watch them</a>.</p>'

    @app.post("/models", status_code=201)
    async def train(response: Response, idempotency_key: Key = None, steps: int = 200) -> dict[str, Any]:
        """Train a model for ``steps`` steps; a request with the same ``Idempotency-Key`` trains no second model."""
        job = {**JOB, "training": {**JOB["training"], "steps": steps}}
        record, is_new = await service.submit(job, idempotency_key)
        response.status_code = 201 if is_new else 200
        return {"id": record.id, "state": record.state}

    @app.get("/models/{job}")
    async def progress(job: str) -> dict[str, Any]:
        record = await service.get(job)
        losses = await service.losses(job, after=max(0, record.step - 1))
        last = {"step": losses[-1].step, "loss": losses[-1].loss} if losses else {"step": 0, "loss": None}
        return {"state": record.state, **last}

    @app.exception_handler(SubmissionError)
    @app.exception_handler(UnknownJobError)
    async def refuse(_: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 422 if isinstance(error, SubmissionError) else 404)

    return app


def application() -> FastAPI:
    """What uvicorn serves; its files are in ``runs/embedded``."""
    folder, devices = "runs/embedded", ["cpu:0", "cpu:1"]
    return make_app(ServiceSettings(devices=devices, entries=["charlm:build"], entry_path=CHARLM, folder=folder))
