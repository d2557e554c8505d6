"""Who decides which ready task of a lane runs next.

``policy`` is the seam: the protocol, and what a policy sees of its lane and of a step. Three classes are behind it,
each readable alone: ``first_come`` (a pipeline that has its lanes for itself), ``ruled`` (a schedule that decides by a
rule) and ``fair_share`` (several jobs on the same lane: each has a ``flow`` there), which asks ``backfill`` whether a
background task fits into a gap.

Imports events, jobs and the task graph; nothing of the scheduler.
"""
