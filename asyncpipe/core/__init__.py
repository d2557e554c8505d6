"""The pure core: what a step is, which task runs when, and what a step would take.

No torch, asyncio, threads, clocks, randomness or environment, and no files except the CSV of a schedule whose path is
given: the same calls give the same answers. Each folder may import those before it:

- ``kinds.py``: the table of task kinds;
- ``schedules/``: which action runs when; ``protocol.py`` says what a schedule is;
- ``graph/``: ``lower`` turns a schedule into a task graph;
- ``policies/``: which ready task of a lane is next;
- ``engine/``: the state machine that runs a task graph: events in, commands out;
- ``records/`` and ``hangs/``: what a step leaves behind, and who is at the root of a wait;
- ``predict/``: costs, simulation, reports, memory, and the planner that searches for the fastest pipeline.

``checks.py`` has checks of options, ``splitmix.py`` a generator of random numbers, ``hosts.py`` names of devices and
which workers are lost together. To follow one step, read ``schedules/protocol.py``, ``graph/lower.py``,
``graph/task_graph.py`` and ``engine/``. ``predict/simulate.py`` runs the engine on virtual time.
"""
