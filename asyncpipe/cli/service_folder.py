"""How the commands of ``asyncpipe service`` find the folder of a service."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncpipe.errors import missing_package

__all__ = ["add_folder_options", "folder_of"]


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a command finds the folder of a service."""
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="the folder of the service")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="the settings of the service, which name it")


def folder_of(args: argparse.Namespace) -> Path:
    """The folder that the options of ``add_folder_options`` name. Raises ``OptionError``, ``SettingsError``."""
    try:
        from asyncpipe.service.settings.service_folder import service_folder
    except ImportError as error:
        raise missing_package("a service needs pydantic-settings", "service") from error
    return service_folder(args.folder, args.config)
