"""The short form: what setuptools would put into the wheel, without building one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.campaigns.packaging.campaign import PROJECT, ROOT, package_files

LISTED = """
import json, sys
from setuptools import Distribution
built = Distribution({"script_name": "setup.py"})
built.parse_config_files()
built.get_command_obj("egg_info").egg_base = sys.argv[1]
files = built.get_command_obj("build_py")
files.ensure_finalized()
print(json.dumps([files.build_lib, files.get_outputs(include_bytecode=False), built.entry_points]))
"""


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path):
    command = [sys.executable, "-c", LISTED, str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder, outputs, entry_points = json.loads(printed.splitlines()[-1])
    assert {Path(path).relative_to(folder).as_posix() for path in outputs} == package_files()
    assert entry_points == {"console_scripts": ["asyncpipe = asyncpipe.cli:main"]}


def test_the_metadata_is_true():
    assert all((ROOT / name).is_file() for name in [*PROJECT["license-files"], PROJECT["readme"]])
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "asyncpipe/__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == PROJECT["version"]
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert "urls" not in PROJECT  # there is no address to be true
