"""Predictions: what a step would take, in time and in memory, and which pipeline of a model would be the fastest.

May import the rest of the core. Read in this order:

- ``costs.py``: cost models, from a task to its virtual seconds;
- ``topology.py``: hosts, devices of different speed, links between them, and costs on these;
- ``simulate.py``: one step, steps that overlap, or several jobs, through the real scheduler on virtual time;
- ``report.py``: bubble, utilisation and peaks of a simulated or real step, and how soon steps follow each other;
- ``idle_reasons.py``: why devices were idle, and what each task waited for; ``ideal_bubble.py``: the schedule's bubble;
- ``memory.py``: the bytes of a step on each device;
- ``balance.py``: layers split into stages of even cost;
- ``layer_profile.py``: measured costs of layers, and from them the costs of every split into stages;
- ``profile_from_journals.py``: those layer costs, computed from the journals of measured steps;
- ``placement.py``: the order of hosts, and layers by the speed of devices;
- ``threads_or_processes.py``: where devices run, by how busy the interpreter's lock would be;
- ``planner.py``: simulates schedules, balances, micro-batches and recomputation modes, and ranks them.
"""
