"""What is taken out of texts for logs, and what stays."""

from __future__ import annotations

import pytest

from asyncpipe.train.redaction import redacted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("connect(host='db', password='hunter2', port=1)", "connect(host='db', password='***', port=1)"),
        ("DB_PASSWORD=hunter2 refused", "DB_PASSWORD=*** refused"),
        ("wrong password: hunter2", "wrong password: ***"),
        ('{"api_key": "hunter2", "n": 3}', '{"api_key": "***", "n": 3}'),
        ("GET https://h/x?token=hunter2&n=3 gave 403", "GET https://h/x?token=***&n=3 gave 403"),
        ("s3://ada:hunter2@store.example/bucket", "s3://***@store.example/bucket"),
        ("{'Authorization': 'Bearer hunter2'}", "{'Authorization': 'Bearer ***'}"),
        ("sent Bearer hunter2hunter2hunter2", "sent Bearer ***"),
        ("hf_hunter2hunter2hunter2 is none", "hf_*** is none"),
        *[(f"{word}=hunter2", f"{word}=***") for word in
          ("passwd", "passphrase", "SECRET", "credentials", "signature", "access_key", "token", "authorization")],
        *[(f"{word}hunter2hunter2hunter2", f"{word}***") for word in
          ("asyncpipe_", "gho_", "ghp_", "ghs_", "ghu_", "github_pat_", "sk-", "xoxb-", "AKIA")],
        *[(text, text) for text in (
            "unexpected token: ']' at 7", "max_tokens=512", "https://h.example/a@b", "F(0,1) failed: OSError: a cable",
            "it does not know the secret", "bearer of bad news",
        )],
    ],
)  # fmt: skip
def test_secrets_are_taken_out_and_the_rest_stays(text: str, told: str) -> None:
    assert redacted(text) == told
    assert "hunter2" not in told
