"""The OpenAPI 3.1 document: FastAPI's, from the declarations of the routes, and what differs from service to service.

The document lists every status that a route can answer with (``routes/common.py``), so that tests can check responses
against it. What a service has of its own are its entries, its devices, the schedules that are installed, whether it has
a token, and the path under which a host mounts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.submission import Submission, SubmittedPipeline
from asyncpipe.train.job_file import AUTO

__all__ = ["describe"]

REF = "#/components/schemas/{model}"


def describe(
    routes: Sequence[BaseRoute], settings: ServiceSettings, entries: Sequence[str], below: str = ""
) -> dict[str, Any]:
    """The document of a service with these ``entries``; ``below`` is the path under which a host mounts the API."""
    from asyncpipe import __version__

    document = get_openapi(
        title="asyncpipe", summary="Training jobs", version=__version__, routes=routes, servers=[{"url": below or "/"}]
    )
    components = document["components"]
    _, answers = models_json_schema(
        [(models.ErrorAnswer, "serialization"), (models.EventAnswer, "serialization")], ref_template=REF
    )
    components["schemas"] |= answers["$defs"]
    _name_what_is_here(components["schemas"], settings, entries)
    if settings.token is not None:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic", "description": "Any user, the token as password"},
        }
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["security"] = [{"bearer": []}, {"basic": []}] if "401" in operation["responses"] else []
    return document


def _name_what_is_here(schemas: dict[str, Any], settings: ServiceSettings, entries: Sequence[str]) -> None:
    # A problem leaves out members that are None.
    for member in schemas[models.ErrorAnswer.__name__]["properties"].values():
        member.pop("default", None)
    schemas[Submission.__name__]["properties"]["entry"]["enum"] = list(entries)
    pipeline = schemas[SubmittedPipeline.__name__]["properties"]
    devices = {"items": {"enum": sorted(set(settings.devices))}, "minItems": 1, "maxItems": len(settings.devices)}
    pipeline["devices"] |= devices
    named = {"type": "string", "pattern": models.SCHEDULE, "maxLength": 200}
    known = known_schedules()
    pipeline["schedule"] = {"default": "1f1b", "anyOf": [{"enum": [AUTO, *known]}, named]}
    schemas[models.ScheduleRequest.__name__]["properties"]["schedule"] = {"anyOf": [{"enum": known}, named]}
