"""Removes paths and secrets from texts that clients see, and shortens them.

Causes and error messages may come from anywhere, and an ``OSError`` names its file. The log has the texts in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asyncpipe.service.token_roles import PREFIX

__all__ = ["Redactor", "shorten"]

_SECRET = "[hidden]"  # noqa: S105 - the replacement of a secret
_TOKEN = re.compile(rf"{PREFIX}[\w-]{{16,}}")
_PATH = re.compile(
    r"""(?<![\w./~…-])(?!//)     # not inside a word, a URL or a relative path
        (?:~|[A-Za-z]:(?=\\))?   # a home, a drive
        (?:[/\\][^\s/\\'":,;<>()\[\]]+){1,}[/\\]?""",
    re.VERBOSE,
)
_SCHEME = re.compile(r"\bfile:/+\S*")


class Redactor:
    """Removes ``secrets``, the names of ``folders`` and absolute paths from texts; of a path the last part stays."""

    def __init__(self, folders: Iterable[Path | str | None], secrets: Iterable[str | None]) -> None:
        names: set[str] = set()
        for folder in folders:
            if folder is not None and str(folder) not in ("", ".", "/"):
                names |= {str(folder), str(Path(folder).absolute()), str(Path(folder).resolve())}
        # The longest first, since one may be a part of another.
        hidden = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        known = sorted(names, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, hidden))) if hidden else None
        self._folders = re.compile("|".join(map(_as_folder, known))) if known else None

    def __call__(self, text: str, longest: int = 2000) -> str:
        """``text`` without secrets and paths, cut to ``longest`` characters."""
        if self._secrets is not None:
            text = self._secrets.sub(_SECRET, text)
        text = _TOKEN.sub(_SECRET, text)
        if self._folders is not None:
            text = self._folders.sub("…/", text)
        text = _SCHEME.sub("…", text)
        return shorten(_PATH.sub(_last_part, text), longest)


def _as_folder(name: str) -> str:
    """The pattern of the folder ``name``. A single word matches only if a path follows it: it may be any word."""
    end = r"(?:[/\\]|(?![\w.-]))" if re.search(r"[/\\]", name) else r"[/\\]"
    return rf"(?<![\w./-]){re.escape(name)}{end}"


def _last_part(found: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[/\\]", found.group()) if part]
    # A word after a single slash is not hidden; "and/or" does not match the pattern of a path.
    return found.group() if len(parts) < 2 else f"…/{parts[-1]}"


def shorten(text: str, longest: int = 100) -> str:
    """``text``, or its beginning and an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
