"""The soak: a training service under load and faults, and whether its process grows.

    soak.py       the run: starts the service, the load and the faults, takes the samples (start reading here)
    jobs.py       the load: jobs and clients, and whether the jobs ended as they should
    faults.py     the faults, which are dealt one by one
    workload.py   the jobs' model, with fault points
    samples.py    what is sampled of the process, and whether it grows
    report.py     the report in Markdown

``python -m tests.campaigns.soak --minutes 30 --report soak.md`` runs it, ``test_soak.py`` its short form.
"""
