"""Artifacts: what of a job can be downloaded, and the downloads, whole or by ranges."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Header, Path, Query

from asyncpipe.service.http import models
from asyncpipe.service.http.download import ArtifactDownload
from asyncpipe.service.http.routes.common import MOST_STEP, Api, JobId, Step, api_router, wrong
from asyncpipe.service.jobs.artifacts import MEDIA

__all__ = ["router"]

NAME = r"^(model(-(0|[1-9][0-9]{0,3}))?\.pt|losses\.(jsonl|csv)|log\.jsonl|trace\.json|timeline\.svg)$"

router = api_router("/v1/jobs/{id}/artifacts")


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}


TAGGED = {
    "ETag": _header("Its SHA-256 in hexadecimal, in quotes") | {"required": True},
    "Repr-Digest": _header("Its SHA-256 (RFC 9530)"),
    "Content-Location": _header("Of a model: where that of this snapshot stays, when there is a newer one"),
}
CONTENT: dict[str, Any] = {
    media: {"schema": {} if media.endswith("json") else {"type": "string", "format": "binary"}}
    for media in dict.fromkeys(MEDIA.values())
}
DONE: dict[int | str, dict[str, Any]] = {
    200: {"description": "All of it", "content": CONTENT, "headers": TAGGED},
    206: {
        "description": "The range that was asked for",
        "content": CONTENT,
        "headers": TAGGED | {"Content-Range": _header("Which bytes, and how many there are") | {"required": True}},
    },
    304: {"description": "If-None-Match has its tag"},
}


@router.get("", name="artifacts", responses=wrong(404))
async def list_artifacts(api: Api, job: JobId) -> models.ArtifactsAnswer:
    """What of a job can be downloaded."""
    found = await api.service.artifacts(job)
    return models.ArtifactsAnswer(artifacts=[models.ArtifactAnswer.of(each) for each in found])


@router.get("/{name}", status_code=200, response_class=ArtifactDownload, responses=DONE | wrong(404, 412, 416))
async def download(
    api: Api,
    job: JobId,
    name: Annotated[str, Path(json_schema_extra={"pattern": NAME}, description="as the list of artifacts has it")],
    step: Annotated[
        Step | None,
        Query(
            description=f"must be an integer from 0 to {MOST_STEP}: the snapshot of a model; by default the newest",
        ),
    ] = None,
    _: Annotated[str | None, Header(alias="Range", description="one range of bytes, as bytes=1000-")] = None,
    __: Annotated[str | None, Header(alias="If-Range", description="the ETag that the range is of")] = None,
) -> ArtifactDownload:
    """Download a model, losses, the log or a trace."""
    opening = partial(api.service.open_artifact, job, name, step, api.redact)
    return ArtifactDownload(opening, job, api.downloads.hold())
