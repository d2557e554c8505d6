"""Real architectures as pipelines, against the same models unsplit.

``zoo_*.py`` builds small models of real architectures from their configs: those of transformers, torchvision, timm and
diffusers. ``judge.py`` cuts one, by its structure or by a trace, and compares losses, gradients and buffers of every
cell (what is recomputed, and the schedule) with the unsplit model in float64. Each architecture has
a process of its own with a time limit (``apart.py``), so that a crash or a hang is a result, too. ``padding.py`` draws
language models and batches of random lengths, and compares with the whole batch's loss by transformers itself.

Start with ``campaign.py``: ``python -m tests.campaigns architectures --only gpt2``.
"""
