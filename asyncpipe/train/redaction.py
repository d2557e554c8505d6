"""Texts of a job's own code without the secrets in them, for logs: passwords, tokens, URLs with credentials."""

from __future__ import annotations

import re

__all__ = ["redacted"]

_STRONG = r"passw(?:or)?d|passphrase|secret|credentials?|signature|(?:api|access|private|account)[_-]?key"
_SECRETS = (
    # password=…, "api_key": "…"; of `token: …` most are a parser's, so that one needs = or quotes.
    rf"(\b[\w-]*(?:(?:{_STRONG})['\"]?\s*[:=]|token(?:\s*=|['\"]\s*[:=]))\s*(?:b?['\"])?)[^\s'\",;&)]+",
    r"(authorization['\"]?\s*[:=]\s*['\"]?(?:\w+\s+)?)[^\s'\",;]+",
    r"(\bbearer\s+)[\w.~+/=-]{16,}",
    r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+(?=@)",
    r"(\b(?:asyncpipe_|hf_|gh[opsu]_|github_pat_|sk-|xox[abp]-|AKIA))[\w-]{12,}",
)
_PATTERN = [re.compile(each, re.IGNORECASE) for each in _SECRETS]
_WORDS = (
    *"passw passphrase secret credential signature key token authorization bearer ://".split(),
    *"asyncpipe_ hf_ gho_ ghp_ ghs_ ghu_ github_pat_ sk- xox akia".split(),
)
"""Each pattern has one of these. To look for them takes a tenth of the time, and most lines have none."""


def redacted(text: str) -> str:
    """``text`` with ``***`` in the place of what looks like a secret."""
    lower = text.lower()
    for pattern in _PATTERN if any(word in lower for word in _WORDS) else ():
        text = pattern.sub(r"\1***", text)
    return text
