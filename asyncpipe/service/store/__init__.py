"""The job store: every job of a service with its history, events and losses, in one SQLite file.

::

    job_store.py         JobStore: the methods that a service awaits, their checks, and the SQL that changes jobs. Start
                         here; nobody else writes the file.
    finding.py           the SQL that reads jobs: lists, filters, and which job a text means
    job_records.py       the SQL of events and losses, which are written in batches
    database_thread.py   the thread that owns the connection and commits many requests at once
    database.py          opening the file, and SQLite's errors in words; schema.py: its tables
    store_errors.py      errors of requests

Which states a job may pass through is in ``service/job_states.py``. May import nothing else of the service.
"""
