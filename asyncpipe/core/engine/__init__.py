"""The state machine of running steps: events go in, commands come out.

Read ``events`` (what goes in and out, and the journal that both leave), then ``scheduler`` (steps and dependencies).
Which ready task of a lane comes next is for the lane's policy: ``policies/``, where a user's own belongs as well.
``dispatcher`` asks the policies and hands tasks over; ``steps`` is the state of steps and lanes, ``jobs`` what is known
of jobs; ``microbatch_admission`` says which micro-batches a rule lets into a device; ``share`` what a job gets of lanes
that others use; ``parts_record`` makes one record of what workers tell, and ``worker_notes`` is what is told of them.
``hangs`` finds the root of a step that stands still, from what workers say of themselves (``worker_reports``).

The runtime drives this with real events, ``core/predict/simulate.py`` with virtual time. Imports the task graph and
schedules; no torch, asyncio, threads or clocks.
"""
