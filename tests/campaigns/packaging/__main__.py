"""``python -m tests.campaigns.packaging --torch torch==2.14.1``: build, install beside that torch, use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.campaigns.packaging.campaign import build, check_files, check_metadata, installed, smoke


def main(argv: Sequence[str] | None = None) -> int:
    """Build, check, install, use."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="torch", help="the requirement of the other torch (default: the newest)")
    parser.add_argument("--environment", type=Path, metavar="FOLDER", help="make, or use again, this environment")
    parser.add_argument("--dist", type=Path, metavar="FOLDER", help="keep what is built in this folder, which is empty")
    options = parser.parse_args(argv)
    with TemporaryDirectory() as scratch, nullcontext(Path(scratch)) as folder:
        built = build(folder)
        check_files(built)
        check_metadata(built.metadata())
        print(f"{built.sdist.name} and {built.wheel.name}: {len(built.in_sdist())} and {len(built.in_wheel())} files")
        if options.dist is not None:
            options.dist.mkdir(parents=True, exist_ok=True)
            for file in (built.sdist, built.wheel):
                (options.dist / file.name).write_bytes(file.read_bytes())
        python, version = installed(options.environment or folder / "environment", options.torch)
        print(smoke(python, built.wheel, folder / "empty", version), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
