"""Clients of the job service: they submit, control and watch jobs. They need httpx (extra ``client`` or ``cli``).

::

    calls.py          everything that can be asked, each call once for both clients. Start here.
    clients.py        JobClient and AsyncJobClient: they carry calls out
    asking.py         one request: when it is repeated, and what is an error
    downloads.py      downloads that go on where they were interrupted
    events.py         parses event streams; errors.py: what calls raise
"""

from asyncpipe.errors import missing_package

try:
    import httpx  # noqa: F401
except ImportError as error:
    raise missing_package("a client of the service needs httpx", "client") from error

from asyncpipe.service.client.clients import AsyncJobClient, JobClient
from asyncpipe.service.client.errors import ApiError, DamagedDownloadError, UnreachableError, WaitTimeoutError
from asyncpipe.service.client.events import ServerEvent

__all__ = [
    "ApiError",
    "AsyncJobClient",
    "DamagedDownloadError",
    "JobClient",
    "ServerEvent",
    "UnreachableError",
    "WaitTimeoutError",
]
