"""Programs written for an ancestor run here with another import: ``torchgpipe`` and ``torch_pipe``.

Both are thin: they check and arrange what the ancestor took, and a ``Pipeline`` does the rest (``module.py``). What
differs on purpose is in ``docs/migration.md``. ``partition`` and ``chunk`` are the ancestors' words for what is a
stage and a micro-batch everywhere else; here they occur as names of their API.
"""
