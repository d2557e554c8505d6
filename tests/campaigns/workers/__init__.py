"""Random runs in worker processes against the same runs on threads: the same bits, and no deadlock.

In the order of a case: ``cases.py`` draws it from its seed, ``layers.py`` builds its model, ``runs.py`` trains it,
``disturbance.py`` delays what passes between workers (and breaks the rules of edges, to see that this is found),
``judge.py`` compares, ``campaign.py`` runs many of them, each with a deadline.
"""
