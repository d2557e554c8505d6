"""Artifacts: what of a job can be downloaded, and the downloads, whole or by ranges."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import Path, Query
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import JobId, Service, Step, api_router
from asyncpipe.service.jobs.artifacts import OpenArtifact

__all__ = ["router"]

router = api_router("/v1/jobs/{id}/artifacts")


class ArtifactDownload(FileResponse):
    """Sends ``artifact``, or the range of it that is asked for; its SHA-256 is its tag."""

    def __init__(self, artifact: OpenArtifact, label: str) -> None:
        super().__init__(
            f"/dev/fd/{artifact.file.fileno()}",  # It may have no name, or lose it meanwhile.
            headers={"ETag": f'"{artifact.sha256}"'},
            media_type=artifact.media_type,
            filename=f"{label}-{artifact.name}",
            stat_result=os.fstat(artifact.file.fileno()),
        )
        self._artifact = artifact

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._artifact.file:
            await super().__call__(scope, receive, send)


@router.get("", name="artifacts")
async def list_artifacts(service: Service, job: JobId) -> models.ArtifactsAnswer:
    """What of a job can be downloaded."""
    return models.ArtifactsAnswer.model_validate({"artifacts": await service.artifacts(job)})


@router.get(
    "/{name}", status_code=200, response_class=ArtifactDownload, responses={206: {"description": "A range"}, 416: {}}
)
async def download(
    service: Service,
    job: JobId,
    name: Annotated[str, Path(description="as the list of artifacts has it")],
    step: Annotated[
        Step | None, Query(description="the step of the snapshot of a model; by default the newest")
    ] = None,
) -> ArtifactDownload:
    """Download a model, losses, the log or a trace."""
    return ArtifactDownload(await service.open_artifact(job, name, step), job)
