"""The settings of a webhook: who is told about jobs, of what, and how long it is tried."""

from __future__ import annotations

import binascii
from base64 import b64decode
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from asyncpipe.service.job_states import JobState
from asyncpipe.service.settings.setting_types import PositiveInteger, Seconds
from asyncpipe.service.settings.token_file import read_token

__all__ = ["WebhookSettings", "key_of"]

PREFIX = "whsec_"
_URL = "must be an address that begins with https:// or http://"

ToldState = Literal["running", "paused", "finished", "failed", "cancelled", "quarantined"]


def _check_url(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not (is_right and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(_URL)
    if "@" in parts.netloc:
        raise ValueError(f"{_URL}, without a user: messages are signed")
    return url


def key_of(secret: str) -> bytes:
    """The key that the text of a secret stands for: base64 behind ``whsec_``, else the text itself.

    Raises ``ValueError`` for what is no base64.
    """
    if not secret.startswith(PREFIX):
        return secret.encode()
    try:
        return b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError(f"what follows {PREFIX} in the file must be base64") from None


class WebhookSettings(BaseModel):
    """Where messages about jobs go. The address and the secret appear neither in ``repr`` nor in errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: Annotated[SecretStr, AfterValidator(_check_url), Field(description=_URL)]
    secret_file: Path = Field(description="must be the path of a file")
    """Holds the secret by which messages are signed: as a token's file, of mode 0600."""
    events: tuple[ToldState, ...] = Field(
        default=("failed", "quarantined"),
        min_length=1,
        description="must be a list of running, paused, finished, failed, cancelled and quarantined",
    )
    """The states of which it is told when a job enters them."""
    timeout_seconds: Seconds = 10.0
    """For one attempt."""
    give_up_seconds: Seconds = 86400.0
    """How old a message may become before it is given up."""
    max_waiting: PositiveInteger = 1000
    """The oldest of more are given up."""
    _secret: SecretStr = PrivateAttr()

    @field_validator("secret_file")
    @classmethod
    def _check_secret(cls, path: Path) -> Path:
        key_of(read_token(path))
        return path

    @model_validator(mode="after")
    def _read_secret(self) -> WebhookSettings:
        self._secret = SecretStr(read_token(self.secret_file))
        return self

    @property
    def secret(self) -> SecretStr:
        """The content of ``secret_file``."""
        return self._secret

    @property
    def states(self) -> tuple[JobState, ...]:
        """The states of ``events``."""
        return tuple(JobState(event) for event in self.events)
