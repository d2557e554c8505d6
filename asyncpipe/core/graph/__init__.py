"""What a step is: a graph of tasks, each on a lane, and what each of them waits for.

May import ``core/schedules`` and ``core/kinds.py``. Read in this order:

- ``task.py``: a task, the lanes that tasks run on;
- ``task_graph.py``: the graph, what stages exchange (``Wiring``), the parts of a step (``Phase``), the critical path;
- ``lower.py``: from a schedule to its graph, with pictures of what is added: copies, recomputations, order edges …;
- ``graph_builder.py``: adds it, numbers the tasks, finds deadlocks;
- ``programs.py``: what each device runs in a step, in order, where nothing is to be decided;
- ``part.py``: what one of several workers runs of a graph, and what it sends to the others;
- ``export.py``: a graph as JSON, Graphviz or torch's CSV.
"""
