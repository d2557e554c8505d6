"""Long tests that are not part of the suite: soaks and fault campaigns, minutes to hours each.

README.md lists all of them with the commands that run them. Most are tests of the suite with more rounds, which an
environment variable sets; those stay beside the code that they test. What is here is too large for one test file:

    soak/          a training service under load and faults, and whether its process grows
    crashes/       worker processes that die, stop or hang, and controllers that are killed
    hosts/         hosts that are lost, and come back
    differential/  random models as pipelines, against the same models unsplit
    packaging/     the wheel, in an empty environment beside another torch
    architectures/ real models as pipelines, against the same models unsplit

A campaign has a short form in the suite (``soak/test_soak.py``). Campaigns import the package and ``benchmarks``;
nothing in the package imports them. Commands run in the repository's root: ``python -m tests.campaigns.soak``.
"""
