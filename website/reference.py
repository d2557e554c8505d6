"""Which public names the reference must show, and which its pages show.

A page of ``docs/reference/`` shows a name by a line ``::: asyncpipe.Pipeline``. Must be shown: what ``asyncpipe`` and
the modules of ``WHOLE`` export, and ``PLUG_INS``, what somebody implements or calls who extends or embeds asyncpipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc, isclass, isroutine
from pathlib import Path
from types import ModuleType

from website.pages import ROOT

__all__ = ["PAGES", "canonical", "found", "missing", "shown", "undocumented", "wanted"]

PAGES = ROOT / "docs" / "reference"
WHOLE = (
    "errors",
    "testing",
    "observe.live",
    "observe.metrics",
    "service.http",
    "compat.torchgpipe",
)
PLUG_INS = (
    "core.records.step_record.FailureCounter",
    "core.records.worker_notes.WorkerWatcher",
    "integrations.transformers.PipelineTrainer",
    "integrations.transformers.PipelineTraining",
    "integrations.trl.PipelineSFTTrainer",
    "observe.mlflow.MLflowObserver",
    "observe.otel.StepSpans",
    "observe.scalars.ScalarObserver",
    "observe.tensorboard.TensorBoardObserver",
    "observe.pictures.html.ComparedStep",
    "observe.pictures.html.html_comparison",
    "observe.pictures.svg.svg_timeline",
    "observe.pictures.timeline.text_timeline",
    "observe.pictures.trace.write_trace",
    "pipeline.options.PipelineArguments",
    "pipeline.pool_options.PoolOptions",
    "runtime.executor.Completion",
    "runtime.executor.Executor",
    "runtime.executor.PostEvent",
    "runtime.executor.StepHandle",
    "runtime.workers.launcher.WatchedProcess",
    "service.client.AsyncJobClient",
    "service.client.JobClient",
    "service.malloc.limit_arenas",
    "service.settings.service_settings.ServiceSettings",
    "train.job_file.Job",
    "train.workload.Resumable",
    "train.workload.Workload",
)
DIRECTIVE = re.compile(r"^::: (asyncpipe[\w.]*)$", re.MULTILINE)


def wanted() -> set[str]:
    """The full names that the reference must show."""
    names = {f"asyncpipe.{name}" for name in import_module("asyncpipe").__all__ if not name.startswith("_")}
    names |= {
        f"asyncpipe.{module}.{name}" for module in WHOLE for name in _exported(import_module(f"asyncpipe.{module}"))
    }
    return names | {f"asyncpipe.{name}" for name in PLUG_INS}


def _exported(module: ModuleType) -> Iterator[str]:
    """The names in ``__all__``, or else the public classes that the module defines."""
    own = (name for name, value in vars(module).items() if isclass(value) and value.__module__ == module.__name__)
    yield from (name for name in getattr(module, "__all__", own) if not name.startswith("_"))


def shown(folder: Path = PAGES) -> dict[str, str]:
    """Which page shows a name, by the full names that stand in ``folder``."""
    pages = ((page.name, page.read_text(encoding="utf-8")) for page in sorted(folder.glob("*.md")))
    return {name: page for page, text in pages for name in DIRECTIVE.findall(text)}


def missing(folder: Path = PAGES) -> set[str]:
    """What the reference must show, and no page of ``folder`` does, by this or another of its names."""
    there = {canonical(name) for name in shown(folder)}
    return {name for name in wanted() if canonical(name) not in there}


def found(name: str) -> object:
    """The object with a full name. Raises ``ImportError`` or ``AttributeError`` where there is none."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def canonical(name: str) -> str:
    """One name for an object that has several, as ``asyncpipe.Pipeline`` and its module's."""
    value = found(name)
    home, own = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return f"{home}.{own}" if str(home).startswith("asyncpipe") and own else name


def undocumented() -> Iterator[str]:
    """The shown names, and public methods and properties of shown classes, without a docstring."""
    for name in shown():
        value = found(name)
        if callable(value) and _is_bare(value):
            yield name
        if isclass(value):
            for member, part in vars(value).items():
                is_member = isroutine(getattr(part, "__func__", part)) or isinstance(part, property)
                if is_member and not member.startswith("_") and not getdoc(getattr(value, member)):
                    yield f"{name}.{member}"


def _is_bare(value: object) -> bool:
    text, own = getattr(value, "__doc__", None) or "", getattr(value, "__name__", "")
    return not text or text.startswith(f"{own}(")  # a dataclass has its signature in place of a docstring
