"""The split backward of every kind of layer, in a process that a crash of torch's kernels may end."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import run_script

SCRIPT = Path(__file__).parents[2] / "support" / "layers_in_halves.py"


@pytest.mark.long
@pytest.mark.promise(
    "Right results",
    "A backward in two halves computes what one backward does, for each kind of layer of `torch.nn` with parameters.",
)
def test_no_layer_crashes_or_computes_anything_else_in_halves(tmp_path: Path) -> None:
    """On the CPU torch's group norm of a channels-last input crashes if only its parameters' gradients are wanted."""
    status, printed, error = run_script(SCRIPT.read_text(encoding="utf-8"), tmp_path)
    *cases, last = printed.splitlines()
    assert (status, last) == (0, "done"), error
    assert "wrong" not in cases
