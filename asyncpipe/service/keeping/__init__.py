"""What is kept of a service's jobs beside the running service: backups, and what is made of them again.

::

    backup.py       a file with the store, the logs and the snapshots of all jobs, made while the service runs
    restore.py      a folder for a service, from such a file
    archive.py      the file's format: a tar archive that says at its end what must be in it

May import ``jobs`` and what is below it; nothing of HTTP.
"""
