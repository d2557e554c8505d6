"""How much of a service a user and a team may have: ``[quotas]`` among the settings of a service."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from asyncpipe.service.settings import setting_types as types

__all__ = ["Quota", "QuotaSettings"]


class Quota(BaseModel):
    """The most of each; what is left out has no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    running_devices: int | None = Field(
        default=None, ge=1, le=10**6, description="must be a number of devices, of at least 1"
    )
    """Devices of running jobs, each once for each job that has it; jobs beyond it wait."""
    queued: int | None = Field(default=None, ge=1, le=10**9, description="must be a number of jobs, of at least 1")
    """Queued jobs, beyond which jobs are refused."""
    bytes: types.ByteCount | None = Field(default=None, description="must be a number of bytes, as 200GiB")
    """Bytes that jobs have on disk, ended jobs as well, from which on new ones are refused."""


class QuotaSettings(BaseModel):
    """The quota of each user, and of each team for the jobs of all who are in it. Nothing is limited without any."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Quota()
    """Of each user."""
    users: dict[str, Quota] = {}
    """By user; what is left out there is as in ``default``."""
    teams: dict[str, Quota] = {}

    def of_user(self, user: str) -> Quota:
        """What ``user`` may have."""
        own = self.users.get(user, Quota()).model_dump(exclude_unset=True)
        return self.default.model_copy(update=own)
