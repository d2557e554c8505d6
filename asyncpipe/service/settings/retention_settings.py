"""What of jobs that have ended is kept, and for how long: ``[retention]`` among the settings of a service."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from asyncpipe.service.settings import setting_types as types

__all__ = ["RetentionRule", "RetentionSettings"]


class RetentionRule(BaseModel):
    """How much is kept, of the jobs that ended last; without any limit, all of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    days: float | None = Field(default=None, gt=0, le=1e6, description="must be a number of days above 0")
    """Since the job has ended."""
    count: int | None = Field(default=None, ge=0, le=10**9, description="must be a number of jobs, of at least 0")


class RetentionSettings(BaseModel):
    """A rule for whole jobs, and one for the snapshots of jobs that stay. Nothing is deleted where there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: RetentionRule = RetentionRule()
    """Whole jobs: their entry in the list, their history, losses and files."""
    snapshots: RetentionRule = RetentionRule()
    every_seconds: types.Seconds = Field(default=3600.0, description="how often; must be a number of seconds above 0")
