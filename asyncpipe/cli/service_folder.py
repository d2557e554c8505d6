"""How the commands of ``asyncpipe service`` find the folder of a service."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.errors import missing_package

if TYPE_CHECKING:
    from asyncpipe.service.settings.service_settings import FolderSettings

__all__ = ["add_folder_options", "folder_of", "folder_settings"]


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a command finds the folder of a service."""
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="the folder of the service")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="the settings of the service, which name it")


def folder_settings(args: argparse.Namespace) -> FolderSettings:
    """What the options of ``add_folder_options``, the environment and the file say. Raises ``SettingsError``."""
    try:
        from asyncpipe.service.settings.service_settings import FolderSettings
    except ImportError as error:
        raise missing_package("a service needs pydantic-settings", "service") from error
    given = {"folder": args.folder, "config": args.config}
    return FolderSettings(**{key: value for key, value in given.items() if value is not None})


def folder_of(args: argparse.Namespace) -> Path:
    """The folder of the service, as ``folder_settings`` has it."""
    return folder_settings(args).folder
