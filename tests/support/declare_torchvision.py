"""Lets an installed torchvision be imported beside a torch that it was not built for; run as a script, once.

The wheels of torchvision that the package registry has are built for CUDA. Beside a torch for CPUs their library cannot
be loaded, and importing torchvision fails at operators that nobody has declared, and with it every import of a model of
transformers. Declared, they are there by name, and raise only where somebody calls them. Does nothing where the library
loads, where torchvision is not installed, and the second time.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

DECLARED = """
if not _has_ops():  # declared by asyncpipe's tests: the library was built for another torch
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Append the declarations to the module that loads the library."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    module = Path(spec.origin).parent / "extension.py"
    text = module.read_text(encoding="utf-8")
    if DECLARED not in text:
        module.write_text(text + DECLARED, encoding="utf-8")


if __name__ == "__main__":
    main()
