"""The OpenAPI 3.1 document: FastAPI's, from the declarations of the routes, and what differs from service to service.

The document lists every status that a route can answer with (``routes/common.py``), so that tests can check responses
against it. What a service has of its own are its entries, its devices, the schedules that are installed, whether it has
a token, and the path under which a host mounts it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import MOST_RETRIES, Submission, SubmittedPipeline, SubmittedTraining
from asyncpipe.train.job_file import AUTO, FaultTable

__all__ = ["describe"]

REF = "#/components/schemas/{model}"
NAME = "^[^\\u0000- \\u007f-\\u00a0](?:[^\\u0000-\\u001f\\u007f-\\u00a0]*[^\\u0000- \\u007f-\\u00a0])?$"
"""Names of jobs: printable, as far as a pattern can say it without a table of Unicode."""


def describe(
    routes: Sequence[BaseRoute],
    settings: ServiceSettings,
    entries: Entries,
    *,
    needs_token: bool,
    below: str = "",
) -> dict[str, Any]:
    """The document of a service with these ``entries``, which may need a token.

    ``below`` is the path under which a host mounts the API.
    """
    from asyncpipe import __version__

    document = get_openapi(
        title="asyncpipe", summary="Training jobs", version=__version__, routes=routes, servers=[{"url": below or "/"}]
    )
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    for operation in operations:
        for parameter in operation.get("parameters", ()):
            _forget_null(parameter["schema"])
    components = document["components"]
    _, answers = models_json_schema(
        [(models.ErrorAnswer, "serialization"), (models.EventAnswer, "serialization")], ref_template=REF
    )
    schemas = components["schemas"] = components["schemas"] | answers["$defs"]
    # A problem leaves out members that are None.
    for member in schemas[models.ErrorAnswer.__name__]["properties"].values():
        member.pop("default", None)
    _describe_submissions(schemas, settings, entries)
    if needs_token:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic", "description": "Any user, the token as password"},
        }
        for operation in operations:
            operation["security"] = [{"bearer": []}, {"basic": []}] if "401" in operation["responses"] else []
    return document


def _forget_null(schema: dict[str, Any]) -> None:
    """A parameter that may be left out has no value for that."""
    alternatives = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(alternatives) == 1:
        del schema["anyOf"]
        schema |= alternatives[0]


def _describe_submissions(schemas: dict[str, Any], settings: ServiceSettings, entries: Entries) -> None:
    """Say what this service takes, as far as a schema can: not whether a schedule fits stages and devices."""
    pipeline = schemas[SubmittedPipeline.__name__]["properties"]
    devices = {"items": {"enum": sorted(set(settings.devices))}, "minItems": 1, "maxItems": len(settings.devices)}
    pipeline["devices"] |= devices | {"uniqueItems": len(set(settings.devices)) == len(settings.devices)}
    layers = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
    pipeline["balance"] = pipeline["balance"] | {"anyOf": [{"const": AUTO}, layers]}
    known = known_schedules()
    names = "|".join(map(re.escape, known))
    option = "[a-z_]{1,20}=-?[0-9]{1,9}"
    named = {"type": "string", "maxLength": 200, "pattern": rf"^(?:{names})(?:\({option}(?:, {option}){{0,3}}\))?$"}
    pipeline["schedule"] = {"default": "1f1b", "anyOf": [{"enum": [AUTO, *known]}, named]}
    schemas[models.ScheduleRequest.__name__]["properties"]["schedule"] = {"anyOf": [{"enum": known}, named]}
    for key, limited in schemas[FaultTable.__name__]["properties"].items():
        if limited.get("type") == "integer":
            schemas[FaultTable.__name__]["properties"][key] = limited | {"maximum": MOST_RETRIES}
    training = schemas[SubmittedTraining.__name__]["properties"]
    training["seed"].pop("exclusiveMaximum")
    training["seed"]["maximum"] = 2**63 - 1024  # What a floating-point number can say, as some programs compare.
    of_entries = [_of_entry(name, entries.schema(name), schemas) for name in entries.names]
    submission = schemas[Submission.__name__]
    submission["properties"]["name"]["pattern"] = NAME
    submission["properties"]["entry"]["enum"] = list(entries.names)
    submission["anyOf"] = of_entries


def _of_entry(entry: str, parameters: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """What a submission of ``entry`` has as well; its ``parameters`` become a schema of the document."""
    name = f"{re.sub('[^A-Za-z0-9._-]', '.', entry)}.parameters"
    text = json.dumps(parameters).replace('"#/$defs/', f'"#/components/schemas/{name}/$defs/')
    schemas[name] = json.loads(text)
    needs = ["parameters"] if parameters.get("required") else []
    of_entry = {"entry": {"const": entry}, "parameters": {"$ref": REF.format(model=name)}}
    return {"properties": of_entry, "required": ["entry", *needs]}
