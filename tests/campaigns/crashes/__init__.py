"""Workers that die, stop and hang, at every kind of task and at any instant; controllers and services that are killed.

``strikes.py`` is what happens to a worker, ``job.py`` the job that goes on from its snapshot each time, ``campaign.py``
the rounds, ``controllers.py`` the kills of a controller, ``services.py`` those of a service with workers, ``left.py``
what may be left of all that: nothing.
"""
