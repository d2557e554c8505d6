"""Who decides which ready task of a lane runs next.

``policy`` is the seam: the protocol, and what a policy sees of its lane and of a step. Two classes are behind it,
each readable alone: ``first_come`` (a pipeline that has its lanes for itself, by the order of its graph or by a rule)
and ``fair_share`` (several jobs on the same lane: each has a ``flow`` there), which asks ``backfill`` whether a
background task fits into a gap. ``jobs`` has what is known of each job, and ``share`` what it gets of shared lanes.

Imports the task graph; nothing of the engine.
"""
