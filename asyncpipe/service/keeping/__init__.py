"""What is kept of a service's jobs: backups, and what is made of them again; what is deleted of ended jobs, and when.

::

    backup.py       a file with the store, the logs and the snapshots of all jobs, made while the service runs
    restore.py      a folder for a service, from such a file
    archive.py      the file's format: a tar archive that says at its end what must be in it
    retention.py    which of ended jobs' data is not kept: pure; disk_use.py: what there is of it
    retainer.py     applies these rules while the service runs

May import ``jobs`` and what is below it; nothing of HTTP.
"""
