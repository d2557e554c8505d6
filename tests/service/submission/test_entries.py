"""Entries that the operator registers: what clients can give them, what they cannot, and which cannot serve at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from torch import nn

from asyncpipe.errors import OptionError
from asyncpipe.service.settings.service_settings import ServiceSettings, SettingsError
from asyncpipe.service.submission.entries import Entries, EntryError
from asyncpipe.train.workload import Workload


class Kind(Enum):
    SMALL = "small"
    LARGE = "large"


def workload() -> Workload:
    return Workload(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, lambda batch_size, generator: iter(()))


def build(
    *,
    width: Annotated[int, Field(ge=1, le=64)],
    rate: float = 0.1,
    kind: Kind = Kind.SMALL,
    mode: Literal["a", "b"] = "a",
    sizes: tuple[int, ...] = (),
    text: str = "",
    optional: int | None = None,
    plain=3,
    data: Path = Path("data"),
    folders: list[Path] | None = None,
    layer: type[nn.Module] = nn.Linear,
    table: dict[str, list[str]] | None = None,
    **rest: int,
) -> Workload:
    """Has a parameter of each sort, and keeps what it was called with."""
    called.append({name: value for name, value in locals().items() if name != "rest"} | rest)
    return workload()


called: list[dict[str, Any]] = []
ENTRIES = Entries({"demo:build": build, "other:build": build}, {"other:build": {"width": 4, "data": "fixed/here"}})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)
    called.clear()


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({}, "parameters.width"),
        ({"width": 0}, "parameters.width"),
        ({"width": 65}, "parameters.width"),
        ({"width": 8.0}, "parameters.width"),
        ({"width": "8"}, "parameters.width"),
        ({"width": True}, "parameters.width"),
        ({"rate": "fast"}, "parameters.rate"),
        ({"kind": "huge"}, "parameters.kind"),
        ({"mode": "c"}, "parameters.mode"),
        ({"sizes": [1, "2"]}, "parameters.sizes[1]"),
        ({"optional": 2**63}, "parameters.optional"),
        ({"plain": [1]}, "parameters.plain"),
        ({"widht": 8}, "parameters.widht"),
        ({"rest": {}}, "parameters.rest"),
        ({"data": "x"}, "parameters.data"),
        ({"folders": ["x"]}, "parameters.folders"),
        ({"layer": "torch.nn.ReLU"}, "parameters.layer"),
        ({"text": "x" * 5000}, "parameters.text"),
        ({"table": {"a": ["../x"]}}, "parameters.table.a[0]"),
        ({"table": {"/etc": ["x"]}}, "parameters.table"),
        ({"table": {"a": "x"}}, "parameters.table.a"),
    ],
)
def test_a_wrong_parameter_is_told_by_its_key(parameters, key):
    given_ = parameters if parameters == {} else {"width": 8, **parameters}
    found = ENTRIES.validate("demo:build", given_)
    assert [problem.key for problem in found] == [key]
    with pytest.raises(EntryError):
        ENTRIES.make("demo:build", given_)


PATHS = [
    "/etc/passwd",
    "  /etc/passwd",
    "../secret",
    "a/../../b",
    "a/ .. /b",
    "..",
    "~/x",
    "~root",
    "C:\\x",
    "c:/x",
    "a\\b",
    "\\\\host\\share",
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "s3://bucket/x",
    "nul\x00",
    "line\nbreak",
    "\x1b[2J",
    "half \ud800",
    "line\u2028break",
]


@pytest.mark.parametrize("text", PATHS, ids=[ascii(text) for text in PATHS])
@pytest.mark.parametrize("key", ["text", "plain", "mode"])
def test_a_text_that_could_lead_elsewhere_is_refused(text, key):
    (problem,) = ENTRIES.validate("demo:build", {"width": 8, key: text})
    assert problem.key == f"parameters.{key}"
    assert "path" in problem.text or "printable" in problem.text


@pytest.mark.parametrize(
    "text", ["", "org/model", "gpt-2.small", "wait...", "a..b", "50/50", "größe", "x~y", "def f(): # ok"]
)
def test_an_ordinary_text_is_allowed(text):
    assert ENTRIES.validate("demo:build", {"width": 8, "text": text}) == []


def test_parameters_come_as_their_annotations_say_and_the_operators_win():
    ENTRIES.make("demo:build", {"width": 8, "rate": 1, "kind": "large", "sizes": [1, 2], "plain": None})()
    (given_,) = called
    assert (given_["width"], given_["rate"], given_["kind"]) == (8, 1.0, Kind.LARGE)
    assert (given_["sizes"], given_["plain"], given_["data"]) == ((1, 2), None, Path("data"))
    called.clear()
    ENTRIES.make("other:build", {"rate": 0.5})()
    assert (called[0]["width"], called[0]["data"]) == (4, Path("fixed/here"))
    (problem,) = ENTRIES.validate("other:build", {"width": 5})
    assert problem == ("parameters.width", "is set by the operator of the service; leave it out")


def test_the_schema_tells_what_can_be_given():
    schema = ENTRIES.schema("demo:build")
    assert set(schema["properties"]) == {"width", "rate", "kind", "mode", "sizes", "text", "optional", "plain", "table"}
    assert schema["required"] == ["width"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["width"] == {"maximum": 64, "minimum": 1, "title": "Width", "type": "integer"}
    assert schema["properties"]["rate"]["default"] == 0.1
    assert "width" not in ENTRIES.schema("other:build")["properties"]
    json.dumps(schema)


def test_a_parameter_may_have_any_name():
    def odd(*, copy: int = 1, model_config: int = 2, schema: str = "", _hidden: float = 0.0) -> Workload:
        return workload()

    entries = Entries({"odd:odd": odd})
    assert entries.validate("odd:odd", {"copy": 3, "model_config": 4, "schema": "x", "_hidden": 1}) == []
    assert entries.validate("odd:odd", {"copy": "3"})


# Entries


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Any]:
    """Writes a module that entries are in; gives settings that name one of its functions."""
    number = len(sys.modules)
    name = f"entries_of_test_{number}"

    def write(code: str, function: str = "build", **entry: Any) -> ServiceSettings:
        imports = "from pathlib import Path\nfrom torch import nn\nfrom asyncpipe.train.workload import Workload\n"
        (tmp_path / f"{name}.py").write_text(imports + code, encoding="utf-8")
        return ServiceSettings(devices=["cpu:0"], entries={f"{name}:{function}": entry}, entry_path=tmp_path)

    yield write
    sys.modules.pop(name, None)


def test_entries_are_imported_from_their_folder_alone_meanwhile(module, tmp_path):
    before = list(sys.path)
    entries = Entries.load(module("def build(*, width: int = 3): pass"))
    assert sys.path == before
    (name,) = entries.names
    assert name.endswith(":build")
    assert name in entries
    assert entries.validate(name, {"width": 3}) == []


@pytest.mark.parametrize(
    ("code", "function", "entry", "part"),
    [
        ("def build(): pass", "other", {}, "has no function 'other'"),
        ("build = 3", "build", {}, "has no function 'build'"),
        ("raise RuntimeError('no')", "build", {}, "could not be imported: RuntimeError: no"),
        ("import nowhere_at_all", "build", {}, "could not be imported: ModuleNotFoundError"),
        ("import sys; sys.exit(2)", "build", {}, "could not be imported: SystemExit: 2"),
        ("def build(*, data: Path): pass", "build", {}, "clients cannot give parameter 'data'"),
        ("def build(*, layer: nn.Module): pass", "build", {}, "clients cannot give parameter 'layer'"),
        ("def build(width, /): pass", "build", {}, "parameter 'width' cannot be given by keyword"),
        ("def build(*, width: 'Nonsense'): pass", "build", {}, "its annotations cannot be read: NameError"),
        ("def build(*, width: int): pass", "build", {"fixed": {"widht": 3}}, "did you mean 'width'? it takes width"),
        ("def build(*, width: int): pass", "build", {"fixed": {"width": "x"}}, "fixed.width: input should be"),
    ],
)
def test_an_entry_that_cannot_serve_is_told_at_the_start(code, function, entry, part, module):
    settings = module(code, function, **entry)
    with pytest.raises(SettingsError) as told:
        Entries.load(settings)
    assert part in str(told.value)
    assert str(told.value).startswith(f"entries.{next(iter(settings.entries))}: ")


def test_what_a_client_cannot_give_the_operator_can(module):
    entries = Entries.load(
        module("def build(*, data: Path, layer: nn.Module = None): return data", fixed={"data": "x/y"})
    )
    (name,) = entries.names
    with pytest.raises(EntryError, match="must return a Workload, not PosixPath"):
        entries.make(name, {})()
    assert entries.schema(name)["properties"] == {}


def test_an_entry_that_turns_a_value_down_is_told_by_its_name():
    def picky(*, width: int = 3) -> Workload:
        raise OptionError("width must be a multiple of heads")

    make = Entries({"picky:build": picky}).make("picky:build", {})
    with pytest.raises(EntryError, match="entry picky:build: parameters: width must be a multiple of heads"):
        make()
    with pytest.raises(EntryError, match=r"entry 'x:y' is not registered; demo:build, other:build are"):
        ENTRIES.make("x:y", {})
