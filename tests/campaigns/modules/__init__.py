"""The modules of torch's own tests (``module_db``) as the middle of a pipeline, against the same models unsplit."""
