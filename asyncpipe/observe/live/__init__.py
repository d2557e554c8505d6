"""The live view: one page that shows a run while it runs, kept up to date by server-sent events.

Read in this order:

- ``view.py``: ``LiveView``, an observer that keeps the newest step and turns it into plain data, by ``step_data.py``
  and ``workers_data.py``
- ``feed.py``: ``LiveFeed``, which folds the view at most four times a second and sends the result to all pages
- ``handlers.py``: the HTTP handlers, ``event_streams.py`` among them; ``server.py``: ``live_app`` and ``serve_live``,
  the way in for programs
- ``live.html``, ``live.css``, ``live.js``, ``timeline.js``: the page of a run, which is also the page of a job of a
  service; ``charts.js``, ``text.js``, ``page.css``: what it shares with the list of jobs
- ``vendor/``: uPlot, which draws the charts

Imports ``core``, ``observe.metrics`` and ``observe.pictures``; starlette and uvicorn only when something is served.
"""

from asyncpipe.observe.live.server import LiveServer, live_app, serve_live
from asyncpipe.observe.live.view import LiveView

__all__ = ["LiveServer", "LiveView", "live_app", "serve_live"]
