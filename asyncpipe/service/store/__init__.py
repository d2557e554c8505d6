"""Every job in one SQLite file: what was acknowledged is on disk."""
