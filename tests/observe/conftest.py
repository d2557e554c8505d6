"""What tests of metrics are given: a registry, and a collector of the job *demo* in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from asyncpipe.observe.metrics import PipelineCollector

# The helper beside these tests is no installed package.
if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(folder)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> PipelineCollector:
    made = PipelineCollector("demo")
    registry.register(made)
    return made
