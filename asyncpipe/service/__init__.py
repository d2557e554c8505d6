"""A service that trains many jobs: it accepts them, queues them, runs them on shared devices, and survives restarts.

::

    training_service.py   TrainingService, the component that an application embeds. Start here.
    job_reading.py        its half that changes nothing; service_loop.py: the loop where all of it happens
    jobs/                 which jobs run, their runs, logs and metrics
    keeping/              backups of a service, and what is made of them again
    submission/           what clients submit, and its checks
    settings/             what the operator sets
    store/                the jobs on disk
    known_tokens.py       who the service knows by their tokens; token_roles.py: what they may do
    http/                 the HTTP API and its pages
    client/               JobClient, and AsyncJobClient for asyncio
    job_states.py         the states of a job and the transitions between them
    malloc.py             limits the C library's heaps

Above this are only the command line and the benchmarks. It runs jobs with ``train`` and shows them with ``observe``.
"""
