"""Schedules: which device runs which action of which micro-batch, and when.

May import ``core/kinds.py`` and ``core/checks.py``. Start with ``protocol.py``, which says what a schedule is and shows
how to write one; ``gpipe.py`` and ``one_f_one_b.py`` are the shortest examples. A new schedule is a file here and a
line in the table of ``registry.py``.

- ``registry.py`` finds a schedule by its name; ``validate.py`` checks what a schedule yields;
- ``gpipe.py``, ``one_f_one_b.py``: one stage on each device, whole backwards;
- ``interleaved.py``, ``hanayo.py``: several stages on each device, in a loop or in waves;
- ``zero_bubble.py``: backwards in halves; ``v_shaped.py``, ``dualpipev.py``: the same, with stages placed in a V;
- ``backward_first.py``: a rule that decides while the step runs;
- ``csv_notation.py``: schedules read from torch's CSV notation.
"""
