"""Who hangs: ``roots`` finds the root of a step that stands still, from what each worker reports (``reports``).

Imports the task graph. It has no clock and ends nothing: ``runtime/watchdog.py`` and ``runtime/hang_search.py`` do.
"""
