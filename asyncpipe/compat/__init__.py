"""The APIs of torchgpipe 0.0.7 and of torch's former ``Pipe``: a program for one of them runs here with another import.

Start with ``module.py``: the base class of both modules, which makes a ``Pipeline`` and calls it in its forward.

``torchgpipe/``    ``GPipe``, and the names of its submodules ``balance`` and ``skip``
``torch_pipe/``    ``Pipe``, ``WithDevice``, and the names of its submodules ``skip`` and ``utils``

Both check their arguments and leave the rest to ``Pipeline``. ``docs/migration.md`` lists the intended differences.
``partition`` and ``chunk`` are these APIs' words for a stage and a micro-batch. The folder may import ``pipeline`` and
everything below it.
"""
