"""The state machine of running steps: events go in, commands come out.

Read ``events`` (what goes in and out, and the journal of both), then ``scheduler`` (steps and dependencies), which has
the diagrams of states. ``steps`` is the state of steps and lanes; ``dispatcher`` asks each lane's policy
(``core/policies/``) for the next task and dispatches it; ``microbatch_admission`` says which micro-batches a rule lets
into a device; ``lane_use`` measures how long other jobs had a lane; ``arbiter`` decides for several processes.

The runtime drives this with real events, ``core/predict/simulate.py`` with virtual time. Imports policies, the task
graph and schedules; no torch, asyncio, threads or clocks.
"""
