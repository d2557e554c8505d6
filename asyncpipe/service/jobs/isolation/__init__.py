"""A job in a process of its own: its entry, its loader and its training.

::

    the service's loop                                       the job's process
      JobRun ─▶ ProcessTrainer ── RunJob, StopRun … ────────▶ job_process.serve ─▶ LastingRun, on a pool of its own
        ▲            ▲   JobProcesses: starts, ends, kills         │
        └── progress ┴─────────────── what happened ◀──────── Relay: the run's collector, observer and progress sink

    job_processes.py    the processes of a service: start them, and end them within a deadline. Start here.
    process_trainer.py  a ``JobTrainer`` whose run is elsewhere
    messages.py         what the two sides say to each other; told_record.py: the record of a step among it
    job_process.py      what runs in the process
    relay.py            tells the service what the run tells there
    confines.py         what the process may use: memory, and time that others leave

A process is a worker as those of ``runtime/workers`` are: forked from one that has imported torch, watched by pings,
and killed by the kernel when the service is gone. Losses, records, snapshots and changes of the schedule pass its
connection and reach the same objects as those of a run on a thread, so nobody behind ``JobRun`` knows the difference.
What is computed does not either: a run in a process draws from a generator of its own, as it does beside others.
"""
