"""The soak: a training service under load and faults, and whether its process grows.

    soak.py       the run: the service, its load, the faults, and what was found (start reading here)
    workload.py   the jobs' model, with fault points
    samples.py    what is sampled of the process, and whether it grows

``python -m tests.campaigns soak --minutes 30`` runs it, ``test_soak.py`` its short form.
"""
