"""What is kept of a service's jobs: backups, and what is made of them again; what is deleted of ended jobs, and when.

::

    backup.py       a tar archive with the store and the snapshots of all jobs, made while the service runs; and back
    retention.py    which of ended jobs' data is not kept, and what deletes it while the service runs

May import ``jobs`` and what is below it; nothing of HTTP.
"""
