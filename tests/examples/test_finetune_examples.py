"""The scripts of ``docs/language-models.md``: six lines at most make a pipeline of each, and the losses stay."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from pathlib import Path

import pytest

for needed in ("transformers", "accelerate", "datasets", "trl"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "finetune"

pytestmark = pytest.mark.filterwarnings("ignore")


def difference(name: str) -> list[str]:
    """The lines that a plain script loses and gains, as the documentation shows them."""
    plain, piped = ((FOLDER / f"{each}.py").read_text().splitlines() for each in (f"{name}_plain", name))
    lines = difflib.unified_diff(plain, piped, n=0, lineterm="")
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return [line for line in changed if line[1:].strip()]


@pytest.mark.parametrize("name", ["own_loop", "with_trainer", "with_sft"])
def test_six_lines_make_a_pipeline_of_a_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = difference(name)
    assert sum(line.startswith("+") for line in lines) <= 6
    assert "```diff\n" + "\n".join(lines) + "\n```" in (ROOT / "docs" / "language-models.md").read_text()
    monkeypatch.syspath_prepend(str(FOLDER))
    modules = [import_module(each) for each in (f"{name}_plain", name)]
    for each in ("tiny", name, f"{name}_plain"):
        sys.modules.pop(each, None)
    plain, piped = (module.main(str(tmp_path / module.__name__), 4) for module in modules)
    assert piped == pytest.approx(plain, abs=1e-4)
    assert len(piped) == 4
    assert (tmp_path / name / "model.safetensors").stat().st_size
