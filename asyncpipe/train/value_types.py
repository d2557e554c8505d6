"""The types of a job file's values, whose descriptions say what a value must be: error messages quote them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, Strict

__all__ = [
    "Flag",
    "NonEmptyText",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OutputFile",
    "OutputFolder",
    "PositiveFloat",
    "PositiveInt",
    "Seed",
    "TcpPort",
]

PositiveInt = Annotated[int, Field(ge=1, description="must be an integer of at least 1")]
NonNegativeInt = Annotated[int, Field(ge=0, description="must be an integer of at least 0")]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, description="must be a finite number greater than 0")]
NonNegativeFloat = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="must be a finite number of at least 0")
]
Seed = Annotated[int, Field(ge=0, lt=2**63, description="must be an integer from 0 to 2**63 - 1")]
TcpPort = Annotated[int, Field(ge=0, le=65535, description="must be a port from 0 (any free one) to 65535")]
NonEmptyText = Annotated[str, Field(min_length=1, description="must be a string that is not empty")]
Flag = Annotated[bool, Field(description="must be true or false")]
OutputFile = Annotated[Path, Strict(False), Field(description="must be the path of a file to write")]
OutputFolder = Annotated[
    Path, Strict(False), Field(description="must be the path of a folder, which is made if it does not exist")
]
