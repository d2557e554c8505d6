"""Pictures of a step, or of several on one time axis, from their records, which may be measured or simulated.

- ``timeline.py``: as text, for terminals; also what all timelines share: rows, labels, shades, units
- ``svg.py``: as an SVG picture
- ``html.py``: several steps compared on one page, from the template ``comparison.html``
- ``trace.py``: as a Chrome trace for Perfetto, with ``trace_counters.py`` and ``trace_tracks.py``

Imports ``core``, and jinja2 for the HTML page. SVG is written by Python code because nearly every attribute is a
computed coordinate; in a template the arithmetic would be apart from the shape it belongs to.
"""
