"""``python -m asyncpipe`` is the ``asyncpipe`` command."""

from __future__ import annotations

import sys

from asyncpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
