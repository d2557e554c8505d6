"""What a client submits, checked against what the operator allows.

- ``submission.py``: the models of a submission, its checks, and the job that is made of it. Start here.
- ``entries.py``: the entries that jobs may name, and the parameters that each accepts.
- ``parameter_rules.py``: which parameter types and values are safe to accept from clients.
- ``from_job_file.py``: the submission for a job file, for clients.

May import ``settings`` and the layers below the service.
"""
