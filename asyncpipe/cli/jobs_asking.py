"""The commands of ``asyncpipe jobs`` that ask the service once. Their docstrings are the texts of their ``--help``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

    Args = argparse.Namespace
    Found = dict[str, Any]
    Several = tuple[dict[str, Any], ...]


def show(client: JobClient, args: Args) -> Found:
    """Show a job and its submission."""
    return client.show(args.job)


def history(client: JobClient, args: Args) -> Several:
    """Show every change of a job's state, with its cause."""
    return client.history(args.job)


def retry(client: JobClient, args: Args) -> Found:
    """Queue a job again that failed or was cancelled.

    Queue a job again that failed, was cancelled or quarantined. It goes on from its newest snapshot, or from that of
    --from-step N. With --from-step 0 it begins from scratch, which it never does by itself if its snapshots are gone.
    Newer snapshots are set aside. --set changes what was submitted, as training.learning_rate=1e-4.
    """
    return client.retry(args.job, args.from_step, dict(args.set))


def fork(client: JobClient, args: Args) -> Found:
    """Submit a copy of a job that goes on from its snapshot.

    The job may be in any state, and stays as it is. The copy goes on from a snapshot of the job, and has its losses
    until there. --from-step and --set are as for `retry`; --set name=NAME gives it another name.

    Prints the new job's id.
    """
    return client.fork(args.job, args.from_step, dict(args.set))


def delete(client: JobClient, args: Args) -> Found:
    """Delete a job that has ended, with all that it has.

    Deletes its history, losses, logs and snapshots, and prints what was deleted; with --dry-run it only prints that.
    """
    return client.delete(args.job, dry_run=args.dry_run)


def workers(client: JobClient, args: Args) -> Several:
    """Show the service's worker processes and their hosts.

    Workers that do not run now are shown as well: they start when the first job needs them. HOST is what `drain` takes:
    the host in the names of devices, or the worker alone. HEARD is how long ago something came from the worker, which
    is asked every half second.
    """
    return client.workers()


def drain(client: JobClient, args: Args) -> Several:
    """Have jobs leave a host after their steps, for maintenance.

    Each job ends its step, takes a snapshot and goes on with other devices, to the same losses and weights. If no
    devices are left for a job, it waits. This lasts until `undrain`, or until the service ends. The host's workers
    keep running; when `workers` shows no jobs there, the host may be switched off.
    """
    return client.drain(args.host)


def undrain(client: JobClient, args: Args) -> Several:
    """Have jobs use a host again."""
    return client.undrain(args.host)


def schedule(client: JobClient, args: Args) -> Found:
    """Run a job's next steps by another schedule."""
    return client.change_schedule(args.job, args.schedule)


def failures(client: JobClient, args: Args) -> Several:
    """Show jobs that have failed, grouped by what went wrong and where.

    A group has all jobs whose last failure has the same root line: the type of the first error, its message without
    numbers and folders, and the innermost frame of the job's own code. `list --root LINE` shows all jobs of a group.
    """
    return client.failures(args.since)


def artifacts(client: JobClient, args: Args) -> Several:
    """Show what of a job can be downloaded."""
    return client.artifacts(args.job)


# Of each of several jobs


def pause(client: JobClient, args: Args, job: str) -> Found:
    """End the job's step, take a snapshot and leave the devices to others."""
    return client.pause(job)


def resume(client: JobClient, args: Args, job: str) -> Found:
    """Continue a paused job when its devices are free."""
    return client.resume(job)


def cancel(client: JobClient, args: Args, job: str) -> Found:
    """End a job for good."""
    return client.cancel(job)


def priority(client: JobClient, args: Args, job: str) -> Found:
    """Change the priority class of jobs, or their priority among those of their user."""
    return client.amend(job, **args.priority)


def weight(client: JobClient, args: Args, job: str) -> Found:
    """Change the weights of jobs."""
    return client.amend(job, weight=args.weight)


def tag(client: JobClient, args: Args, job: str) -> Found:
    """Change the tags of jobs."""
    tags = [tag for tag in client.show(job)["tags"] if tag not in args.remove]
    return client.amend(job, tags=dict.fromkeys([*tags, *args.add]))
