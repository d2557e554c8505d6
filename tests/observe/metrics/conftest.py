"""Fixtures of the tests of metrics: a registry, and a collector of the job *demo* in it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from asyncpipe.observe.metrics import PipelineCollector


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> PipelineCollector:
    made = PipelineCollector("demo")
    registry.register(made)
    return made
