"""The jobs of a service: which ones may start, how each one runs, and what is recorded of it.

::

    manager.py             starts queued jobs and records how their runs end. Start here.
    job_queue.py           the order of queued jobs, and which may begin: pure
    placement.py           on which devices a job begins that names none: pure
    usage.py               what users have used of the devices: pure
    deadlines.py           jobs that have to end by a time
    job_run.py             one run of a job
    run_outcome.py         how it ended, and the job's next state: pure
    isolation/             a run in a process of its own
    ended_jobs.py          what clients ask of jobs that have ended: retry, fork, delete
    lost_state.py          reports missing state at the start, so that no job restarts from scratch
    job_folder.py          the files of a job, when it begins, is copied or deleted
    active_jobs.py         the jobs that have not ended, and the requests of clients; the only place where a job changes
                           its state
    outlook.py             how fast a job goes, when it will be done, for what it waits
    last_view.py           what the live page of a job shows when it does not run
    job_log.py             the events and steps of a job, for the store and for those who follow it
    service_metrics.py     the metrics of the service

May import ``store``, ``submission`` and ``settings``; knows nothing of HTTP.
"""
