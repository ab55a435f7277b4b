"""What a configuration says about an export: its section `export`. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..config.run_config import load_config
from ..config.saved_config import read_saved_config
from ..config.sections import ConfigSection
from ..core.errors import SpecError
from ..core.spec.yaml_source import Section, Text, declare


class Export(Section):
    """The `export` section: what `fxplug export` does with the saved rewrite where its call does not say."""

    to: Literal["pt2", "aoti", "onnx"] = declare(
        "pt2", "a program of torch.export's, compiled ahead of time, or for onnxruntime", "aoti"
    )
    free: Literal["all", "batch", "none"] = declare("all", "which sizes stay free", "batch")
    device: Text | None = declare(None, "where compiled code will run; null: where it is exported", "cuda")


EXPORT = ConfigSection(
    Export,
    declare(Export(), "the default options of `fxplug export`", {"to": "onnx"}),
    {Export: "`export`"},
)


def read_saved_export(folder: str | Path, **given: str | None) -> Export:
    """Read how `export` writes a saved rewrite: as `given` says, and for what is None there as its configuration does.

    What an older configuration has in its section without a meaning stays without one.
    """
    said = {key: value for key, value in given.items() if value is not None}
    saved = (read_saved_config(folder) or {}).get("export")
    kept = saved if isinstance(saved, dict) else {}
    kept = {key: kept[key] for key in Export.model_fields if key in kept and key not in said}
    try:
        section: Export = load_config({"model": "the saved one", "export": kept}).export
        return section.model_copy(update=said)
    except SpecError as error:
        raise SpecError(f"{Path(folder) / 'config.yaml'}: {error}") from None
