"""Lets tests of the core import the helpers beside them."""

from __future__ import annotations

import sys
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(folder)
