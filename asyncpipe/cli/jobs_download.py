"""``asyncpipe jobs download``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from asyncpipe.cli.jobs_text import plain
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

__all__ = ["download"]

WORDS = {"losses": "losses.jsonl", "log": "log.jsonl", "trace": "trace.json", "timeline": "timeline.svg"}


def download(client: JobClient, args: argparse.Namespace) -> int:
    """Download a model, losses, the log or a trace.

    The job may run or have ended. WHAT is `model` (the default; one file, or one for each stage where these live in
    workers), `losses` (JSON lines), `log`, `trace`, or a name that `asyncpipe jobs artifacts` shows, as losses.csv. The
    model is that of the newest snapshot, or of the one after --step.

    Give the command again to continue a download that was interrupted. A file appears when it is whole. Load a model
    with torch.load(FILE, weights_only=True), which executes nothing that is in it.
    """
    wanted = _wanted(client, args)
    if len(wanted) > 1 and not args.to.is_dir():
        raise OptionError(f"--to: there is no folder {args.to} for {', '.join(plain(name) for name, _ in wanted)}")
    for name, step in wanted:
        path = client.download(args.job, name, args.to, step=step)
        size = path.stat().st_size
        found = {"artifact": name, "path": str(path), "bytes": size}
        print(json.dumps(found) if args.json else f"{plain(path)}: {size:,} bytes")
    return 0


def _wanted(client: JobClient, args: argparse.Namespace) -> list[tuple[str, int | None]]:
    """(name, step of a model's snapshot) of all that is to be downloaded. The files of a model are of one snapshot."""
    wanted: list[tuple[str, int | None]] = []
    for word in args.what:
        if word != "model":
            wanted.append((WORDS.get(word, word), args.step if word.startswith("model") else None))
            continue
        models = [each for each in client.artifacts(args.job) if each.get("step") is not None]
        step = models[0]["step"] if models and args.step is None else args.step
        mine = [(str(each["name"]), int(each["step"])) for each in models if each["step"] == step]
        if not mine:
            steps = ", ".join(dict.fromkeys(str(each["step"]) for each in models)) or "none yet"
            raise OptionError(f"the job has no model of that snapshot; it has snapshots after these steps: {steps}")
        # A file by itself may as well be of a newer snapshot, when it has begun; those of stages belong together.
        wanted += mine if len(mine) > 1 else [(mine[0][0], args.step)]
    return list(dict.fromkeys(wanted))
