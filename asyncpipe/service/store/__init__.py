"""The job store: every job of a service and the history of its states, in one SQLite file.

::

    job_store.py         JobStore: the methods that a service awaits, and their checks. Start here.
    database_thread.py   the thread that owns the connection and commits many requests at once
    queries.py           the SQL that changes jobs, one function for each part of a transaction
    reading.py           the SQL that reads them: lists, filters, and which job a text means
    changes.py           what has happened to all jobs, for those who tell others of it
    token_queries.py     that of tokens; token_changes.py: what an operator does with them, beside the service
    database.py          opening the file, and SQLite's errors in words; schema.py: its tables

Which states a job may pass through is in ``service/job_states.py``. May import nothing else of the service.
"""
