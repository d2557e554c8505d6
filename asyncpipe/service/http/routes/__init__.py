"""The routes of the API, each declared once: its path, its parameters, its body and its answer.

A handler's signature is read by FastAPI, which checks requests by it, and describes it in the OpenAPI document::

    @router.get("/{id}/history")
    async def history(service: Service, job: JobId) -> HistoryAnswer:
        \"""Every transition of a job.\"""

A new route is a function in one of these modules. A new module is listed here.
"""

from __future__ import annotations

from asyncpipe.service.http.routes import artifacts, documents, ended, jobs, logs, probes, workers
from asyncpipe.service.token_roles import TokenRole

__all__ = ["PROBES", "ROUTERS"]

ROUTERS = (
    (jobs.router, TokenRole.SUBMIT),
    (ended.router, TokenRole.SUBMIT),
    (artifacts.router, TokenRole.OPERATE),
    (logs.router, TokenRole.OPERATE),
    (workers.router, TokenRole.OPERATE),
    (documents.router, TokenRole.OPERATE),
    (probes.router, TokenRole.OPERATE),
)
"""All of them, with the role that a change by them needs; what is changed of a job needs a right to it as well."""
PROBES = frozenset({"/livez", "/readyz"})
"""Paths that need no token."""
