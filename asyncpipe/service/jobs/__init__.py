"""Many jobs: who is next, what becomes of each, and what is kept of it."""
