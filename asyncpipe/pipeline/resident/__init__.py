"""What a worker process runs: the stages of pipelines that live there, and their parts of steps.

Imports ``pipeline`` and what is below. The controller never imports it. In the order of a worker's life:

``serve.py``       the entry of a worker: its pool of devices, and what the controller tells it
``resident.py``    one pipeline's stages here: loaded, run by parts of steps, unloaded
``links.py``       its edges to other workers: what is sent, and to which step goes what arrives
``part_step.py``   this worker's part of one step
``self_report.py``  what its threads are at, when the controller looks for the root of a hang
"""
