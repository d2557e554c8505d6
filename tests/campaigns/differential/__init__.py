"""The differential campaign: random models of real layers, split at random, against the same model unsplit.

    cases.py     what a case is, and how one is drawn from a seed (start reading here)
    pieces.py    the layers that models are made of, in a table; those that are not torch's own are beside it:
    layers.py    layers as people write them: buffers, in-place operations, hooks inside, TorchScript, containers
    hooks.py     hooks on modules and parameters, and how often each was called
    reference.py the unsplit model, run micro-batch by micro-batch
    runs.py      the same model as a pipeline, by one of the faces
    judge.py     compares both: right, refused, void (the unsplit model itself fails) or a finding
    campaign.py  all of it, and the report

``python -m tests.campaigns differential --cases 2000 --seed 1 --minutes 30`` runs it, ``test_differential.py`` its
short form.
"""
