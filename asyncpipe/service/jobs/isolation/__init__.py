"""A job in a process of its own: its entry, its loader and its training.

::

    the service's loop                                     the job's process
      JobRun ─▶ ProcessRun ───── RunJob, stop … ─────────▶ job_process.serve ─▶ LastingRun, on a pool of its own
        ▲            ▲   JobProcesses: starts, ends           │
        └── progress ┴─────────── what happened ◀────────── Relay: the run's collector, observer and progress sink

    job_processes.py    the processes of a service. Start here.
    process_run.py      a run that is elsewhere, ended within a deadline
    messages.py         what the two sides say to each other
    job_process.py      what runs in the process
    relay.py            tells the service what the run tells there
    job_output.py       what its code prints and logs, for the log of the run (service/jobs/run_log.py)
    arbitration.py      the process that says whose turn it is on devices that jobs share, and their way to it
    confines.py         how much memory the process may use

A process is a worker as those of ``runtime/workers`` are: forked from one that has imported torch, watched by pings,
and killed by the kernel when the service is gone; but it leads a group, which ends with it. Losses and snapshots pass
its connection at once; metrics are summed in the process, and pass it once a second, with the records of the last
steps. So nobody behind ``JobRun`` knows the difference.

What is computed does not differ either: a run in a process draws from a generator of its own, as it does beside others.

Where jobs share devices, each keeps its stages and its threads. Its driver asks the arbiter when each task may begin
(``runtime/turn_taking.py``), and that has the scheduler which jobs on threads have (``core/engine/arbiter.py``).
"""
