"""What the tasks of a step compute: from a ``Task`` of the graph to a callable on its lane's stream.

Imports the other folders of ``asyncpipe.ops`` and ``asyncpipe.core``. Where to start:

- ``binder``: gives each task its computation, its stream, and the events that it waits for; one ``match`` over the
  kinds of tasks says what computes which;
- ``compute``: F, R, B, I and W of a stage; ``stage_run``: what a forward, and its recomputation, computes;
- ``step_tensors``: the tables of tensors through which the tasks of one step pass values to each other;
- ``shared_values``: refuses to overwrite what another stage reads too;
- ``caller_gradients``: gradients of the caller's own input tensors, gathered from those of the micro-batches;
- ``gradient_guard``: a failed step leaves the parameters' gradients as they were; ``gradient_turn``: one step's or
  backward's at a time; ``parameter_hooks``: hooks see whole gradients;
- ``optimizer_states`` and ``stage_files``: what stages and their optimizers have to remember, by name, and in files;
  ``dcp_files`` in torch's distributed checkpoint;
- ``instruments``: names of tasks for profilers, samples of memory.
"""
