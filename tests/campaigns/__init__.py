"""Long tests that are not part of the suite: soaks and fault campaigns, minutes to hours each.

README.md lists all of them with the commands that run them. Most are tests of the suite with more rounds, which an
environment variable sets; those stay beside the code that they test. What is here is too large for one test file:

    harness.py     what all share: options, cases from a seed, processes, progress, the report
    __main__.py    the command line
    models/        random models of real layers, for the next two
    differential/  random models as pipelines, against the same models unsplit
    modules/       each module of torch's own tests in a pipeline, against the same model unsplit
    workers/       random runs in worker processes, against threads
    architectures/ real models as pipelines, against the same models unsplit
    faults/        faults, cancellations and hung tasks at random points of a step
    hangs/         something hangs in a worker, and the error must name it
    crashes/       worker processes that die, stop or hang, and controllers that are killed
    hosts/         hosts that are lost, and come back
    soak/          a training service under load and faults, and whether its process grows
    service/       floods, faults and a full house, made to happen to a real service
    packaging/     the wheel, in an empty environment beside another torch
    launchers.py   the example on threads, processes, Ray and torchrun
    gpt2_replicas.py   the same for a GPT-2 in replicas, and against transformers alone

A campaign has a short form in the suite (``soak/test_soak.py``). Campaigns import the package and ``benchmarks``;
nothing in the package imports them. Commands run in the repository's root: ``python -m tests.campaigns soak``.
"""

import sys
from pathlib import Path

# Campaigns use the same helpers as tests do, by the same names.
_SUPPORT = str(Path(__file__).parents[1] / "support")
if _SUPPORT not in sys.path:
    sys.path.append(_SUPPORT)
