"""The pure core: no torch, asyncio, threads, clocks, randomness or environment.

Read in the order of a step: ``task`` → ``schedule`` → ``lower`` → ``graph`` → ``events`` → ``scheduler`` →
``report``; ``simulate`` drives the same scheduler on virtual time.
"""
