"""asyncio, threads and processes: runs task graphs on executors. Imports ``core`` and ``errors`` only, and no torch.

In the order of a step:

``driver.py``      passes events to the scheduler and its commands to executors, on one asyncio loop
``step_driver.py`` what the drivers of threads and of workers share: begin, wait for, end and refuse steps
``step_abort.py``  how a step ends early: the order of flag, inbox and STOP, with its proof
``execution.py``   one step under way on threads, and its gates
``executor.py``    the seam: what an executor is given, and what it reports
``program_run.py``  one device's program in one step: how far it has come, and who is told
``device_thread.py``  what a device's thread does: single tasks and programs
``arrivals.py``    where a device's thread waits for what other processes send, which it takes itself
``thread_executor.py``  the executor of a pipeline: its threads, and their successors when a task hangs
``inline.py``      runs a graph inside a task of another one, on its thread
``observers.py``   calls observers with the records of completed steps
``portal.py``      a loop in a thread of its own, which drives steps for callers on any loop and any thread
``waits.py``       code that is written once for callers that await and for callers that block
``turn_taking.py`` devices that other processes use as well: an arbiter says when each task may begin
``turn.py``        whose turn it is to step a pipeline
``line.py``        steps that follow each other
``task_board.py``  what the threads of a worker run, in memory that its controller reads
``process.py``     the process that threads live in, which a forked child is not
``task_threads.py``  which code runs inside a task
``thread_calls.py``  calls in threads for coroutines that wait for them: errors, cancellation
``parts_driver.py``  runs steps in workers (``parts_execution.py``, ``part_messages.py``)
``watchdog.py``    fails a step whose task hangs, on a thread or in a worker
``hang_search.py``  asks the workers of a step that hangs what they are at, and ends what is at the root
``workers/``       worker processes, and the connection to each
"""
