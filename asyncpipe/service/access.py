"""Whose jobs one may see and change. Pure.

::

                own    of a team of one's    of others
    see         yes    read, change          read         settings team_access and others
    change      yes    change                no           with the role submit
    delete      yes    no                    no           with the role submit

Who has the role ``operate`` may do everything with all jobs, and so may everybody where no token is needed. Jobs that
have no owner, as those from before there were users, are the operators'. A job's teams are those of its owner when it
was submitted. What one may not see looks as if it did not exist.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.token_roles import TokenRole

__all__ = ["Access", "NotYoursError", "Whose"]


class Whose(NamedTuple):
    """The jobs that ``user`` owns, and those of any of ``teams``."""

    user: str | None = None
    teams: tuple[str, ...] = ()

    def has(self, owner: str | None, teams: Collection[str]) -> bool:
        """Whether jobs of ``owner``, who is in ``teams``, are among them."""
        return (owner is not None and owner == self.user) or not set(self.teams).isdisjoint(teams)


class NotYoursError(AsyncpipeError, PermissionError):
    """A job belongs to somebody else, and may be seen but not changed."""


@dataclass(frozen=True, slots=True)
class Access:
    """What ``user`` may do, whose role is ``role``, with the settings ``team_access`` and ``others``."""

    user: str
    role: TokenRole
    teams: tuple[str, ...]
    team_access: str
    others: str

    @property
    def seen(self) -> Whose | None:
        """Whose jobs the user sees; ``None``: all."""
        if self.role is TokenRole.OPERATE or self.others == "read":
            return None
        return Whose(self.user, () if self.team_access == "none" else self.teams)

    def may_see(self, job: JobRecord) -> bool:
        """Whether ``job`` exists for the user."""
        return self.seen is None or self.seen.has(job.owner, job.teams)

    def check(self, job: JobRecord, deed: str) -> None:
        """Raise ``NotYoursError`` unless the user may do ``deed``, as "cancel" or "delete", with ``job``."""
        with_teams = self.team_access == "change" and deed != "delete"
        mine = Whose(self.user, self.teams if with_teams else ())
        if self.role is TokenRole.OPERATE or mine.has(job.owner, job.teams):
            return
        if job.owner is None:
            whose, who = "to nobody", "only operators"
        else:
            teams = [f"the team {team}" for team in job.teams] if with_teams else []
            whose, who = f"to {job.owner}", f"only {', '.join([job.owner, *teams])} and operators"
        raise NotYoursError(f"job {job.id} belongs {whose}; you are {self.user}: {who} may {deed} it")
