"""Snapshots of a training run on disk, and how a run continues from one.

``format.py``             the files of one snapshot: written as a whole or not at all, verified when they are read
``writer.py``             takes snapshots while training continues, and removes the oldest
``resume.py``             finds the newest intact snapshot of a folder and restores its states
``stages_in_workers.py``  what workers write and read by themselves
``run_state.py``          the state of a run besides its model and optimizer (``run.pt``)

May import from ``asyncpipe.train``, except ``training_loop`` and ``training_run``, which use this folder.
"""
