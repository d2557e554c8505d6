"""The program of a worker process: ``python -m asyncpipe.worker``, started by a launcher, with an invitation on stdin.

``ray_driver.py`` is what the worker does in which Ray runs, ``under_torchrun.py`` what torchrun's processes do.

It may import what is below it, but needs to import only the runtime: what a worker does is named by its invitation.
"""
