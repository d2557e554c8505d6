"""Workers that die, stop and hang at every kind of task and at random instants, and controllers that are killed.

``strikes.py`` is what happens to a worker, ``job.py`` the job that goes on from its snapshot each time, ``campaign.py``
the rounds, ``controllers.py`` the kills of a controller, ``left.py`` what may be left of all that: nothing.
"""
