"""What the documentation says to type is what the command line and the settings take."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpipe.cli import _joined, _parser
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.from_job_file import FOR_SERVICE, read_submission
from asyncpipe.service.submission.submission import SubmittedPipeline
from website.commands import help_text

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
JOB = ROOT / "examples" / "charlm" / "charlm.toml"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> Iterator[list[str]]:
    """The arguments of each command in a shell block."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    for line in lines:
        if (found := re.match(r"(?:[A-Z_]+=\S+ )*asyncpipe (.*)", line)) is not None:
            words = shlex.split(found[1], comments=True)
            end = next((at for at, word in enumerate(words) if word in {"&&", "|", ">"}), len(words))
            yield words[:end]


def is_known(words: list[str]) -> bool:
    """Whether the command line takes the command."""
    if words[0] == "serve":  # Its options are made from the settings, whose files there are not.
        return {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", help_text("serve")))
    try:
        return bool(_parser().parse_args(_joined(words)).run)
    except SystemExit:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_the_command_line_takes_the_commands_of_a_page(page):
    assert [words for words in commands(PAGES[page]) if not is_known(words)] == []


def test_a_wrong_command_of_a_page_is_seen():
    page = "```sh\nasyncpipe jobs explain J\nA=b asyncpipe serve --fold x  # no\nasyncpipe jobs show J > f\n```"
    assert [is_known(words) for words in commands(page)] == [False, False, True]
    assert sum(1 for _ in commands(PAGES["operating.md"])) > 20


@pytest.mark.parametrize("block", blocks(PAGES["operating.md"], "toml"))
def test_the_settings_of_the_page_for_operators_are_settings(block):
    settings = ServiceSettings(devices=["cpu:0"], entries=["charlm:build"], **tomllib.loads(block))
    assert settings.model_fields_set > {"devices", "entries"}


@pytest.mark.parametrize("block", blocks(PAGES["service.md"], "toml"))
def test_the_table_for_the_service_is_one_of_a_job_file(tmp_path, block):
    path = tmp_path / "job.toml"
    path.write_text(f"{JOB.read_text(encoding='utf-8')}\n{block}", encoding="utf-8")
    assert tomllib.loads(block)["service"].keys() <= read_submission(path)[0].keys()


def test_the_page_has_every_key_for_the_service_and_each_way_to_ask_for_devices():
    table = PAGES["service.md"].partition("| key | effect |")[2].partition("\n\n")[0]
    assert [key for key in FOR_SERVICE if f"`{key}" not in table] == []
    table = PAGES["service.md"].partition("| `devices =` |")[2].partition("\n\n")[0]
    asked = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(asked) == 4
    for devices in asked:
        assert SubmittedPipeline.model_validate(tomllib.loads(f"devices = {devices}")).request.count in {2, 4}
