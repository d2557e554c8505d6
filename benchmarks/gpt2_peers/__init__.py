"""One GPT-2 with asyncpipe, torch.distributed.pipelining and accelerate: ``compare.py`` runs and compares them."""
