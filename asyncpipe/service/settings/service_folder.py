"""Where the folder of a service is, for commands that work on it without all other settings."""

from __future__ import annotations

import os
from pathlib import Path

from asyncpipe.service.settings.service_settings import ServiceSettings, SettingsError
from asyncpipe.train.validation import read_toml

__all__ = ["service_folder"]


def service_folder(folder: Path | None = None, config: Path | None = None) -> Path:
    """``folder``; or the one that ``asyncpipe serve --config FILE`` would use with this environment.

    Raises ``SettingsError`` for a file that cannot be read.
    """
    if folder is not None:
        return folder
    if given := os.environ.get("ASYNCPIPE_FOLDER"):
        return Path(given)
    file = config or os.environ.get("ASYNCPIPE_CONFIG")
    found = read_toml(Path(file), SettingsError).get("folder") if file else None
    if found is None:
        default: Path = ServiceSettings.model_fields["folder"].default
        return default
    if not isinstance(found, str):
        raise SettingsError(f"{file}: folder: must be the path of a folder")
    return Path(found)
