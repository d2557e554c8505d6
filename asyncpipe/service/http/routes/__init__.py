"""The routes of the API, each declared once: its path, its parameters, its body, its answer and how it can fail.

A handler's signature is read by FastAPI, which checks requests by it, and describes it in the OpenAPI document. What
all routes have in common (limits of the body, unknown keys, problems, statuses) is ``common.py``'s ``ApiRoute``::

    @router.get("/{id}/history", responses=wrong(404))
    async def history(api: Api, job: JobId) -> HistoryAnswer:
        \"""Every transition of a job.\"""

A new route is a function in one of these modules. A new module is listed here.
"""

from __future__ import annotations

from asyncpipe.service.http.routes import artifacts, documents, ended, jobs, overview, probes, workers
from asyncpipe.service.http.routes.common import ApiRoute

__all__ = ["PROBES", "ROUTES"]

ROUTES = [
    route
    for module in (jobs, ended, overview, artifacts, workers, documents, probes)
    for route in module.router.routes
    if isinstance(route, ApiRoute)
]
"""All of them; the first that matches a request answers it."""
PROBES = frozenset(route.path for route in ROUTES if not route.guarded)
"""Paths that need no token, and are not counted."""
