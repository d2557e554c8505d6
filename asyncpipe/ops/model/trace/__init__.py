"""Cuts any module into stages, by tracing it with ``torch.export``.

Imports ``asyncpipe.core``, the modules beside this folder, ``asyncpipe.ops.autograd`` and torch. In the order of a
trace:

- ``trace``: the entry, which traces the model in train and eval mode, cuts it and builds the stages;
- ``inputs``: the arguments of the example, and the check that later arguments fit them;
- ``export``: one mode of the model as a graph;
- ``cut``: the traced graph, and the positions where it is cut;
- ``overwrites``: what is changed in place, and which cuts that forbids;
- ``graph_writer``: writes a stage's part of the graph as a graph of its own, for any device;
- ``traced_stage``: the stages, and what they send each other.
"""
