"""``asyncpipe jobs artifacts`` and ``download``: what of a job can be downloaded, and the downloads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import natural
from asyncpipe.cli.jobs_text import plain
from asyncpipe.cli.tables import table
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

__all__ = ["DOWNLOAD", "add_download_arguments", "artifacts", "download"]

DOWNLOAD = """\
Download artifacts of a job, while it runs or when it has ended: WHAT is `model` (the default; one file, or one for each
stage where these live in workers), `losses` (JSON lines), `log`, `trace`, or a name that `asyncpipe jobs artifacts`
has, as losses.csv. The model is that of the newest snapshot, or of the one after --step.

A download that was interrupted goes on where it was when the command is given again. A file appears when it is whole.
Load a model with torch.load(FILE, weights_only=True), which executes nothing that is in it.
"""
WORDS = {"losses": "losses.jsonl", "log": "log.jsonl", "trace": "trace.json", "timeline": "timeline.svg"}


def add_download_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``download``."""
    add = parser.add_argument
    add("what", metavar="WHAT", nargs="*", default=["model"], help="model (the default), losses, log, trace, or a name")
    add("--to", type=Path, default=Path(), metavar="PATH", help="the folder, or for one artifact the file (default: .)")
    add("--step", type=natural, metavar="N", help="the model of the snapshot after step N (default: the newest)")


def artifacts(client: JobClient, args: argparse.Namespace) -> int:
    """Print what can be downloaded."""
    found = client.artifacts(args.job)
    print(json.dumps(found) if args.json else _artifacts_table(found))
    return 0


def download(client: JobClient, args: argparse.Namespace) -> int:
    """Download what is named, and print where it is."""
    wanted = _wanted(client, args)
    if len(wanted) > 1 and not args.to.is_dir():
        raise OptionError(f"--to: there is no folder {args.to} for {', '.join(plain(name) for name, _ in wanted)}")
    for name, step in wanted:
        path = client.download(args.job, name, args.to, step=step)
        size = path.stat().st_size
        if args.json:
            print(json.dumps({"artifact": name, "path": str(path), "bytes": size}))
        else:
            print(f"{plain(path)}: {size:,} bytes")
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


def _artifacts_table(found: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (
            plain(each["name"]),
            "" if each.get("step") is None else str(each["step"]),
            "" if each.get("size") is None else f"{each['size']:,}",
        )
        for each in found
    ]
    return table(("NAME", "STEP", "BYTES"), rows, numbers=("STEP", "BYTES"))
