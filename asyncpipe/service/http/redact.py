"""Text for strangers: nothing of the file system, no secret, not too long.

Causes and messages come from wherever something failed, and an ``OSError`` names its file. What an operator needs is
in the log, in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Redactor", "shorten"]

_SECRET = "[hidden]"  # noqa: S105 - what stands for one
_PATH = re.compile(
    r"""(?<![\w./~…-])(?!//)     # not inside a word, a URL or a relative path
        (?:~|[A-Za-z]:(?=\\))?   # a home, a drive
        (?:[/\\][^\s/\\'":,;<>()\[\]]+){1,}[/\\]?""",
    re.VERBOSE,
)
_SCHEME = re.compile(r"\bfile:/+\S*")


class Redactor:
    """Takes absolute paths, the names of ``folders`` and ``secrets`` out of texts; of a path its last part stays."""

    def __init__(self, folders: Iterable[Path | str | None], secrets: Iterable[str | None]) -> None:
        names: set[str] = set()
        for folder in folders:
            if folder is not None and str(folder) not in ("", ".", "/"):
                names |= {str(folder), str(Path(folder).absolute()), str(Path(folder).resolve())}
        # The longest first: one may be a part of another.
        hidden = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        known = sorted(names, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, hidden))) if hidden else None
        self._folders = re.compile("|".join(map(_as_folder, known))) if known else None

    def __call__(self, text: str, longest: int = 2000) -> str:
        """``text``, cut to ``longest`` characters, without what nobody outside needs to know."""
        if self._secrets is not None:
            text = self._secrets.sub(_SECRET, text)
        if self._folders is not None:
            text = self._folders.sub("…/", text)
        text = _SCHEME.sub("…", text)
        return shorten(_PATH.sub(_last_part, text), longest)


def _as_folder(name: str) -> str:
    """What finds the folder ``name``; a single word only where something below it is named: it may be any word."""
    end = r"(?:[/\\]|(?![\w.-]))" if re.search(r"[/\\]", name) else r"[/\\]"
    return rf"(?<![\w./-]){re.escape(name)}{end}"


def _last_part(found: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[/\\]", found.group()) if part]
    # A word after a single slash is not worth hiding, and "and/or" never comes here.
    return found.group() if len(parts) < 2 else f"…/{parts[-1]}"


def shorten(text: str, longest: int = 100) -> str:
    """``text``, or its beginning and a sign that there was more."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
