"""The configuration in the folder of a saved rewrite. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SpecError
from .run_config import load_config
from .train_section import Export
from .yaml_source import read_yaml


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


def read_saved_export(folder: str | Path, **given: str | None) -> Export:
    """Read how `export` writes a saved rewrite: as `given` says, and for what is None there as its configuration does.

    What an older configuration has in its section without a meaning stays without one.
    """
    said = {key: value for key, value in given.items() if value is not None}
    section = (read_saved_config(folder) or {}).get("export")
    kept = section if isinstance(section, dict) else {}
    kept = {key: kept[key] for key in Export.model_fields if key in kept and key not in said}
    try:
        return load_config({"model": "the saved one", "export": kept}).export.model_copy(update=said)
    except SpecError as error:
        raise SpecError(f"{Path(folder) / 'config.yaml'}: {error}") from None
