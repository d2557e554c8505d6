"""What a step leaves behind: its record, which observers, metrics and traces read.

``step_record`` is the record: graph, journal, outcome, and the notes of ``step_notes``. ``compilations`` and
``worker_notes`` are parts of the notes. ``parts_record`` makes one record of the parts that workers ran, and
``clocks`` puts the workers' times on one clock. Imports the engine.
"""
