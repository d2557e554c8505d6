"""The API of torchgpipe 0.0.7: a program for it runs here with another import.

``torchgpipe/``    ``GPipe``, and the names of its submodules ``balance`` and ``skip``

It checks its arguments and leaves the rest to ``Pipeline``. ``docs/migration.md`` lists the intended differences.
``partition`` and ``chunk`` are torchgpipe's words for a stage and a micro-batch. The folder may import ``pipeline`` and
everything below it.
"""
