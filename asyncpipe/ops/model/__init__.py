"""A model as stages: how it is cut, what its stages pass to each other, and where they are placed.

Imports ``asyncpipe.core``, ``asyncpipe.ops.device``, ``asyncpipe.ops.autograd`` and torch. Where to start:

- ``stage``: what every model is cut into; ``sequential`` cuts a sequence of layers, ``trace`` any module;
- ``microbatch``: cuts a mini-batch into micro-batches, and gathers their outputs;
- ``tensor_uses``: which stages use which parameters and buffers;
- ``ties``: places stages on devices, with replicas of parameters that stages on several devices share;
  ``module_image``: modules of which a stage has some children or tensors of its own;
- ``shipping``: a model as bytes, for a worker that owns some of its stages;
- ``feed``: mini-batches that are made from the number of a step; ``functions``: functions by name, and seeded draws;
- ``state_files``: a state in a file, with its checksum; ``weight_files``: weights in files that others read;
- ``skips`` and ``skip_layout``: tensors that a layer passes to a later layer, and between which stages they travel;
- ``input_copies``: copies of what a stage receives, where it overwrites that;
- ``buffers``: what a recomputation reads of the buffers that forwards change; ``parameter_watch`` refuses forwards that
  change parameters, ``output_watch`` recomputations that compute other values;
- ``batchnorm``: batch norms that update their running statistics once a mini-batch;
- ``measure_layers``: time and memory of each layer, to balance stages by; ``byte_recorder``: bytes of each layer while
  a pipeline runs.
"""
