"""The configuration in the folder of a saved rewrite. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.errors import SpecError
from ..core.spec.yaml_source import read_yaml


def read_saved_config(folder: str | Path) -> dict[str, Any] | None:
    """Read the configuration in the folder of a saved rewrite, as plain data; None where there is none.

    Raises SpecError for a file that is no configuration.
    """
    file = Path(folder) / "config.yaml"
    if not file.exists():
        return None
    read = read_yaml(file)
    if not isinstance(read.data, dict):
        raise SpecError("this is not a configuration: it has no keys", where=read.where())
    return read.data
