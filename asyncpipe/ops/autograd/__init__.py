"""Custom autograd functions, and other ways to control the backward of a stage's local graph.

Imports ``asyncpipe.core``, ``asyncpipe.ops.device`` and torch; knows nothing of stages or steps. Where to start:

- ``fork_join``: Fork and Join, edges that order the nodes of a backward graph;
- ``checkpoint``: Checkpoint and Recompute, which drop activations and run the forward again before the backward;
- ``split_backward``: a backward in two halves, for the tasks I and W;
- ``random_streams``: random draws that depend on the seed, the micro-batch and the stage only;
- ``caller_graph``: how the outputs of ``pipe(x)`` belong to the caller's autograd graph;
- ``caller_context``: autocast, grad mode and inference mode of the caller, for the threads that run its tasks.
"""
