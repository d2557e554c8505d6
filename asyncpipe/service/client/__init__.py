"""Clients of the job service: they submit, control and watch jobs.

::

    calls.py          everything that can be asked, each call as a dialogue. Start here.
    asking.py         one request: when it is repeated, and what is an error
    dialogue.py       what a call says to the client that carries it out
    downloads.py      downloads that go on where they were interrupted
    events.py         parses event streams; errors.py: what calls raise
    blocking.py       JobClient, with the standard library alone
    asynchronous.py   AsyncJobClient, with httpx

What is asked, repeated and raised is decided once, without any connection; a client only sends and reads.
"""

from asyncpipe.service.client.asynchronous import AsyncJobClient
from asyncpipe.service.client.blocking import JobClient
from asyncpipe.service.client.downloads import DamagedDownloadError
from asyncpipe.service.client.errors import ApiError, UnreachableError, WaitTimeoutError
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
