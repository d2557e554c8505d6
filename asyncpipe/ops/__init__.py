"""The torch side: what a task does. No asyncio.

Read in the order of a step: ``stage`` → ``microbatch`` → ``binder`` → ``checkpoint`` → ``dependency`` → ``copy``
→ ``stream``.
"""
